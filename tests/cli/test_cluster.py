"""hpcgen cluster: profiles found, shown with their places, and checked in one go."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcgen.resources import shipped
from tests.cli.command import hpcgen
from tests.runs import big_run, write_yaml

SITE = """\
extends: azure-ndv5
scratch: /mnt
partitions: {hpc: {max_nodes: 4}}
"""
WRONG_KEYS = """\
extends: azure-ndv5
gres: gpu:4
sractch: /x
partitions: {hpc: {max_nodes: two}, gpu: {max_time: "1:00:00"}}
slurm: {partition: gpuq, time: 3 days}
environment: {RANK: "1", HF_TOKEN: hunter2, A-B: "1", Y: 1}
"""
WRONG = """\
extends: azure-ndv5
gres: gpu:4
scratch: /x
partitions: {hpc: {max_nodes: 2}, gpu: {max_time: "1:00:00"}}
slurm: {partition: gpuq}
environment: {RANK: "1", HF_TOKEN: hunter2}
container: {mounts: [{source: /lustre}, {source: /other, target: /lustre}]}
health_command: [check.sh]
slurm_version: "19.05"
"""


@pytest.fixture
def profiles(workplace: Path) -> Path:
    directory = workplace / "clusters"
    directory.mkdir()
    (directory / "site.yaml").write_text(SITE)
    return directory


def test_list(profiles):
    (profiles / "wrong.yaml").write_text(WRONG_KEYS)
    rows = json.loads(hpcgen("cluster", "list", "--json").stdout)
    assert [row["name"] for row in rows] == ["azure-ndv5", "local", "site", "wrong"]
    assert rows[2]["file"] == "clusters/site.yaml"
    assert rows[3]["description"] == "invalid; run hpcgen cluster check wrong"
    found = hpcgen("cluster", "list")
    assert (found.status, found.stderr) == (0, "")
    assert "local       This machine, CPUs only, no container\n" in found.stdout


def test_show_has_every_value_with_its_place(profiles):
    found = hpcgen("cluster", "show", "site")
    assert (found.status, found.stderr) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in found.stdout.splitlines() if "  " in line)
    assert lines["scratch"] == "/mnt  [clusters/site.yaml:2]"
    assert lines["partitions.hpc.max_nodes"] == "4  [clusters/site.yaml:3]"
    assert re.fullmatch(r"pyxis  \[.*/azure-ndv5\.yaml:\d+\]", lines["container.runtime"])
    assert lines["python"] == "python3  [default]"
    assert "code_dir" not in lines
    assert "\nnode type ndv5: Azure ND96isr_H100_v5" in found.stdout


def test_show_lists_partitions_without_limits():
    assert "partitions.hpc" in hpcgen("cluster", "show", "azure-ndv5").stdout


def test_show_has_the_prices_limits_and_settings_of_stages(workplace):
    (workplace / "uni.yaml").write_text(
        "extends: azure-ndv5\n"
        "partitions: {hpc: {price_per_gpu_hour: 2.5}}\n"
        "price_per_gpu_hour: 3\n"
        "currency: EUR\n"
        "qos: {short: {max_time: '30:00'}, any: {}}\n"
        "slurm: {prepare: {partition: cpu}}\n"
    )
    lines = hpcgen("cluster", "show", "./uni.yaml").stdout.splitlines()
    shown = dict(line.split(maxsplit=1) for line in lines if "  " in line)
    assert shown["partitions.hpc.price_per_gpu_hour"].startswith("2.5  [")
    assert (shown["price_per_gpu_hour"].split()[0], shown["currency"].split()[0]) == ("3.0", "EUR")
    assert (shown["qos.short.max_time"].split()[0], shown["qos.any"].split("  ")[0]) == ("30:00", "no limits")
    assert shown["slurm.prepare.partition"].split()[0] == "cpu"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("price_per_gpu_hour: -1", "price_per_gpu_hour = -1 must be"),
        ("partitions: {hpc: {price_per_gpu_hour: -1}}", "partitions.hpc.price_per_gpu_hour = -1 must be"),
        ("currency: euro", "currency = euro must be the three letters of a currency"),
        ("required_settings: [acount]", "required_settings[0] = acount must be a key of slurm: nodes, "),
        ("mpi: PMIx", "mpi = PMIx must be a name that `srun --mpi=list` prints, such as pmix"),
        ("modules: [cuda 12]", "must be the name of an environment module, such as cuda/12.4"),
        ("secrets: [SLURM_JWT]", "secrets[0] = SLURM_JWT is not a secret"),
        ("stripe: {size: 100}", "stripe.size = 100 must be"),
        ("stripe: {count: -2}", "stripe.count = -2 must be"),
        ("qos: {short: {max_tiem: 1:00:00}}", "qos.short.max_tiem"),
        ("slurm: {trian: {qos: a}}", "slurm.trian is not a known key; did you mean train?"),
        (
            "slurm: {train: {pratition: a}}",
            "slurm.train.pratition = a is not a known key; did you mean partition?",
        ),
    ],
)
def test_mistakes_in_new_keys(workplace, line, message):
    (workplace / "uni.yaml").write_text(f"extends: azure-ndv5\n{line}\n")
    found = hpcgen("cluster", "check", "./uni.yaml")
    assert (found.status, found.stderr.count("uni.yaml:2: ")) == (2, 1)
    assert message in found.stderr


def test_show_as_json(profiles):
    shown = json.loads(hpcgen("cluster", "show", "site", "--json").stdout)
    assert shown["file"] == "clusters/site.yaml"
    assert shown["values"]["scratch"] == {"value": "/mnt", "origin": "clusters/site.yaml:2"}
    assert shown["values"]["code_dir"] == {"value": None, "origin": "default"}
    assert shown["node_type"]["name"] == "ndv5"


def test_check_of_a_valid_profile(profiles):
    found = hpcgen("cluster", "check", "site")
    assert (found.status, found.stdout) == (0, "site is valid: clusters/site.yaml, node type ndv5\n")


@pytest.mark.parametrize("name", ["azure-ndv5", "local"])
def test_the_shipped_profiles_are_valid(name):
    assert hpcgen("cluster", "check", name).status == 0


def test_check_warns_as_render_would(workplace):
    profile = "extends: azure-ndv5\nnode_type: quad\nenvironment:\n  NCCL_SOCKET_IFNAM: eth0\n"
    facts = "description: 4 GPUs\ndevice: cuda\ngpus_per_node: 4\nsite: azure\n"
    for path, text in (("clusters/quad.yaml", profile), ("topologies/quad.yaml", facts)):
        (workplace / path).parent.mkdir(exist_ok=True)
        (workplace / path).write_text(text)
    found = hpcgen("cluster", "check", "quad")
    assert found.status == 0
    assert (
        "quad.yaml:4: environment.NCCL_SOCKET_IFNAM has no effect, because nothing reads it; did you mean"
        in found.stderr
    )
    assert found.stderr.count("does not set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME") == 1


def places_of_mistakes(name: str) -> list[tuple[int, str]]:
    """Line and key of each mistake in a profile."""
    found = hpcgen("cluster", "check", name)
    assert (found.status, found.stdout) == (2, "")
    assert "hunter2" not in found.stderr
    lines = [
        re.match(rf"clusters/{name}\.yaml:(\d+): (\S+)", line) for line in found.stderr.splitlines()[:-1]
    ]
    assert all(lines)
    return sorted((int(line[1]), line[2]) for line in lines if line)


def test_check_reports_all_mistakes_of_a_round_at_once(profiles):
    (profiles / "wrong.yaml").write_text(WRONG_KEYS)
    assert places_of_mistakes("wrong") == [
        (3, "sractch"),
        (4, "partitions.hpc.max_nodes"),
        (5, "slurm.time"),
        (6, "environment.A-B"),
        (6, "environment.Y"),
    ]
    (profiles / "wrong.yaml").write_text(WRONG)
    assert places_of_mistakes("wrong") == [
        (2, "gres"),
        (5, "slurm.partition"),
        (6, "environment.HF_TOKEN"),
        (6, "environment.RANK"),
        (7, "container.mounts[1].target"),
        (8, "health_command[0]"),
        (9, "slurm_version"),
    ]


def test_check_reports_an_invalid_node_type_with_the_profile(profiles):
    (profiles / "none.yaml").write_text("gres: gpu:4\nscratsh: /a\n")
    found = hpcgen("cluster", "check", "none").stderr
    assert "none.yaml: node_type is missing" in found
    assert "none.yaml:2: scratsh = /a is not a known key" in found
    (profiles / "none.yaml").write_text("node_type: mine\nslurm_version: '1.1'\n")
    write_yaml(profiles.parent / "topologies/mine.yaml", {"description": "x", "device": "gpu"})
    found = hpcgen("cluster", "check", "none").stderr
    assert "topologies/mine.yaml:3: device = gpu must be cuda or cpu; use cuda" in found
    assert "topologies/mine.yaml: gpus_per_node is missing" in found
    assert 'none.yaml:2: slurm_version = "1.1" must be' in found


@pytest.mark.parametrize("verb", ["show", "check"])
def test_an_unknown_profile_name(verb):
    found = hpcgen("cluster", verb, "lcal")
    assert (found.status, found.stderr) == (2, "lcal is not a known cluster profile; did you mean local?\n")


@pytest.mark.process
def test_names_are_completed():
    environment = {
        **os.environ,
        "_HPCGEN_COMPLETE": "bash_complete",
        "COMP_WORDS": "hpcgen cluster check lo",
        "COMP_CWORD": "3",
    }
    command = [sys.executable, "-m", "hpcgen"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["plain,local"]


def test_the_small_node_of_the_readme(workplace, monkeypatch):
    """Its containers see their GPUs, although it names none of enroot's variables."""
    text = (shipped("topologies") / "README.md").read_text()
    node_type, profile = re.findall(r"```yaml\n# /etc/hpcgen/\S+\n(.*?)```", text, re.DOTALL)
    for path, content in (("topologies/quad.yaml", node_type), ("clusters/orion.yaml", profile)):
        (workplace / path).parent.mkdir()
        (workplace / path).write_text(content)
    assert hpcgen("cluster", "check", "orion").status == 0
    found = hpcgen("render", "nccl-test", "--cluster", "orion", "--set", "slurm.nccl_test.nodes=2")
    assert found.status == 0, found.stderr
    assert "SOCKET_IFNAME" not in found.stderr
    for assignment in (
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_DRIVER_CAPABILITIES='compute,utility'",
        "MELLANOX_VISIBLE_DEVICES=void",
    ):
        assert f"\n    export {assignment} # " in found.stdout
    for fabric in ("infiniband", "roce"):
        bare = f"description: x\ndevice: cuda\ngpus_per_node: 4\nfabric: {fabric}\n"
        (workplace / "topologies/quad.yaml").write_text(bare)
        found = hpcgen("render", "nccl-test", "--cluster", "orion", "--set", "slurm.nccl_test.nodes=2")
        assert "\n    export MELLANOX_VISIBLE_DEVICES=all # " in found.stdout
    assert "node_type = quad does not set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME" in found.stderr
    assert "SOCKET_IFNAME" not in hpcgen("render", "nccl-test", "--cluster", "orion").stderr


def image_run(workplace: Path, **image: str) -> Path:
    values = big_run(image={"output": "/shared/images/new.sqsh", **image})
    return write_yaml(workplace / "run.yaml", values)


def test_a_wrong_code_path_is_one_mistake(workplace):
    found = hpcgen("render", "image", "-c", image_run(workplace, code="/shared/../code"))
    assert found.status == 2
    message, _ = found.stderr.splitlines()
    assert "image.code = /shared/../code must be an absolute path" in message
    assert message.endswith("without '..'")


def test_an_image_and_a_code_directory_that_do_not_exist(workplace):
    image, code = workplace / "gpt.sqsh", workplace / "code"
    (workplace / "clusters").mkdir()
    profile = {"extends": "azure-ndv5", "container": {"image": str(image)}, "code_dir": str(code)}
    write_yaml(workplace / "clusters/orion.yaml", profile)
    run = write_yaml(workplace / "run.yaml", big_run(cluster="orion", container={}))
    for command in (("cluster", "check", "orion"), ("validate", "-c", run), ("render", "train", "-c", run)):
        found = hpcgen(*command)
        assert found.status == 0, found.stderr
        assert f"container.image = {image} does not exist; correct the path, or build" in found.stderr
        assert f"code_dir = {code} does not exist; set it to the directory" in found.stderr
    image.touch()
    code.mkdir()
    assert hpcgen("cluster", "check", "orion").stderr == ""


def test_a_missing_code_directory(workplace):
    there = workplace / "code"
    found = hpcgen("render", "image", "-c", image_run(workplace, code=str(there)))
    assert f"{there}: no such file. Stage image needs it" in found.stderr
    there.mkdir()
    assert hpcgen("render", "image", "-c", image_run(workplace, code=str(there))).status == 0
    found = hpcgen("render", "image", "-c", image_run(workplace, code="/elsewhere/code"))
    assert "/elsewhere/code was not checked, because this machine has no /elsewhere" in found.stderr


# permissions hold for root as well, once it has given up the capability to pass over them
WITHOUT_OVERRIDE = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()


@pytest.mark.process
@pytest.mark.skipif(bool(WITHOUT_OVERRIDE) and not shutil.which("setpriv"), reason="root reads everything")
@pytest.mark.parametrize(
    ("folder", "arguments"),
    [
        ("clusters", ["render", "nccl-test", "--cluster", "local"]),
        ("clusters", ["cluster", "list"]),
        ("topologies", ["topology", "list"]),
        ("topologies", ["topology", "show", "ndv5"]),
        ("site/slurm", ["render", "nccl-test", "--cluster", "local", "--templates", "site"]),
    ],
)
def test_an_unreadable_directory_is_not_treated_as_empty(tmp_path, folder, arguments):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder).chmod(0)
    found = subprocess.run(
        [*WITHOUT_OVERRIDE, sys.executable, "-m", "hpcgen", *arguments],
        cwd=tmp_path,
        env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "xdg")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout) == (2, "")
    assert f"{folder}: the directory cannot be read; chmod u+rx {folder}" in found.stderr
    (tmp_path / folder).chmod(0o700)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["site", "--write", "--nodes", "3"], "--write, --nodes: only with --run; add --run"),
        (
            ["local", "--run", "--write"],
            "--write: local is a profile that hpcgen ships; write a profile of your own",
        ),
        (
            ["site", "--run", "--nodes", "5"],
            "--set slurm.nccl_test.nodes: slurm.nccl_test.nodes = 5 is more than",
        ),
    ],
)
def test_a_job_that_cannot_help_is_refused_before_it_is_submitted(profiles, arguments, message):
    found = hpcgen("cluster", "check", *arguments)
    assert found.status == 2
    assert message in found.stderr
    assert sorted(path.name for path in profiles.parent.iterdir()) == ["clusters"]
