from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from hpcgen.stages import STAGES
from tests.cli.command import hpcgen, listing
from tests.cli.every_stage import STAGES_AND_RUNTIMES, script_of
from tests.patience import PATIENCE_S
from tests.runs import big_run, minimal_run, write_yaml
from tests.selection import select

SITE = {"extends": "azure-ndv5", "environment": {"NCCL_DEBUG": "INFO"}}


@pytest.fixture
def run_file(workplace: Path) -> Path:
    """A relative path, as people type it."""
    write_yaml(workplace / "run.yaml", big_run(environment={"NCCL_DEBUG": "TRACE"}, secrets=["HF_TOKEN"]))
    return Path("run.yaml")


def line_of(path: Path, text: str) -> int:
    [found] = [number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line]
    return found


def explained(*arguments: object) -> dict:
    found = hpcgen("explain", *arguments, "--json")
    assert found.status == 0, found.stderr
    return json.loads(found.stdout)


def test_a_variable_with_all_its_overridden_values(workplace, run_file):
    write_yaml(workplace / "site.yaml", SITE)
    found = hpcgen("explain", "-c", run_file, "--set", "cluster=./site.yaml", "NCCL_DEBUG")
    run_line = line_of(run_file, "TRACE")
    assert (found.status, found.stderr) == (0, "")
    assert found.stdout.splitlines() == [
        f"NCCL_DEBUG=TRACE  run file, run.yaml:{run_line}",
        f"    overrides INFO from the cluster ({workplace}/site.yaml:4)",
        "    overrides WARN from the node type (nvidia: NCCL user guide, NCCL_DEBUG; ai-infrastructure-on-azure, "
        "hopper.conf): Logs errors; INFO floods the log at scale.",
    ]


def test_values_from_facts_and_from_the_command_line(run_file):
    found = hpcgen("explain", "-c", run_file, "--set", "environment.FOO=it's a b", "FOO", "NCCL_PXN_DISABLE")
    assert found.stdout.splitlines() == [
        "FOO='it'\"'\"'s a b'  override, --set environment.FOO",
        "NCCL_PXN_DISABLE=1  node type, ndv5: ai-infrastructure-on-azure, hopper.conf",
        "    Each GPU uses its own NIC; relaying through a neighbor over NVLink is slower here.",
    ]


def test_the_explanation_is_complete(run_file, monkeypatch):
    """Every name that the script exports or takes, and what it unsets, is there."""
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_SECRET", "hunter2")
    found = hpcgen("explain", "-c", run_file)
    lines = found.stdout.splitlines()
    assert lines[0].startswith("# stage train on azure-ndv5 (Azure ND96isr_H100_v5")
    assert "MASTER_ADDR: address of the step's first node, as reported by scontrol" in lines
    assert "TRAINER_CONFIG: /shared/runs/big/jobs/JOBID/trainer.json" in lines
    assert "HOME: /nvme/hpcgen-CLUSTER-JOBID, for the tasks only" in lines
    assert (
        lines[lines.index("# secrets, inherited from the submitting shell and never written to a file") + 1]
        == "HF_TOKEN"
    )
    [unset] = [line for line in lines if line.startswith("this shell exports ")]
    assert "NCCL_ALGO, NCCL_SECRET" in unset
    assert "hunter2" not in found.stdout + found.stderr


def test_an_unset_variable_comes_with_the_change_that_sets_it(run_file):
    found = hpcgen("explain", "-c", run_file, "--set", "preset=125m", "CUDA_DEVICE_MAX_CONNECTIONS")
    assert found.stdout.splitlines() == [
        "# not set; these changes would set them",
        "--set parallelism.tensor_model_parallel_size=2: CUDA_DEVICE_MAX_CONNECTIONS=1  stage, Megatron-LM, "
        "arguments.py",
        "    Before Blackwell, keeps communication ahead of compute with TP or CP (Megatron-LM, arguments.py).",
    ]


@pytest.mark.parametrize("stage", select(STAGES.keys(), ("image", "run", "tokenize", "train")))
def test_each_change_gives_the_variable_it_promises(run_file, stage):
    """The options printed are options that work."""
    newest = "container.torch_version='2.9'"
    promised: dict[str, dict[str, str]] = {}
    for item in explained("-c", run_file, "--set", newest, "--stage", stage)["not_set"]:
        promised.setdefault(item["change"], {})[item["name"]] = item["value"]
    assert promised
    for change, values in promised.items():
        options = shlex.split(change)
        stage_option = [] if "--stage" in options else ["--stage", stage]
        # of two settings of one key the last one counts
        changed = explained("-c", run_file, "--set", newest, *stage_option, *options, *values)
        assert {variable["name"]: variable["value"] for variable in changed["variables"]} == values


@pytest.mark.parametrize(("stage", "runtime"), STAGES_AND_RUNTIMES)
def test_every_export_of_the_script_is_explained(tmp_path, workplace, stage, runtime):
    script = script_of(tmp_path, stage, runtime)
    # not what the files that it writes and the programs that it sends to the nodes export
    script = re.sub(r"^check_host\(\) \{$.*?^\}$", "", script, flags=re.MULTILINE | re.DOTALL)
    script = re.sub(r"<<'(\w+)'\n.*?^\1$", "", script, flags=re.MULTILINE | re.DOTALL)
    script = re.sub(r"='\n.*?^'$", "", script, flags=re.MULTILINE | re.DOTALL)
    script = re.sub(r"^ *#.*|(?<= )# .*", "", script, flags=re.MULTILINE)
    exported = {
        name
        for words in re.findall(r"^ *export +(.*)", script, re.MULTILINE)
        for name in re.findall(r"(?:^| )([A-Za-z_]\w*)(?==|$| )", words)
    }
    found = explained("-c", tmp_path / "run.yaml", "--stage", stage)
    names = {variable["name"] for variable in found["variables"]}
    assert names <= exported
    assert exported <= names | set(found["computed"])


def test_as_json(run_file):
    found = explained("-c", run_file, "NCCL_DEBUG", "WORLD_SIZE", "HF_TOKEN")
    assert found["stage"] == "train"
    [variable] = found["variables"]
    [hidden] = variable["hides"]
    assert {**variable, "hides": None} == {
        "name": "NCCL_DEBUG",
        "value": "TRACE",
        "layer": "run file",
        "why": "set by the run file",
        "origin": f"run.yaml:{line_of(run_file, 'TRACE')}",
        "hides": None,
    }
    assert (hidden["value"], hidden["layer"]) == ("WARN", "node type")
    assert found["computed"] == {"WORLD_SIZE": "number of ranks in the step"}
    assert found["secrets"] == ["HF_TOKEN"]
    assert "NCCL_*" in found["unset"]["patterns"]
    assert found["not_set"] == []


def test_names_may_be_patterns(run_file):
    found = explained("-c", run_file, "NCCL_IB_*", "*_OFFLINE")
    assert [variable["name"] for variable in found["variables"]] == [
        "HF_HUB_OFFLINE",
        "NCCL_IB_PCI_RELAXED_ORDERING",
        "NCCL_IB_QPS_PER_CONNECTION",
        "TRANSFORMERS_OFFLINE",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "NCCL_IB_QPS_PER_CONN",
            "NCCL_IB_QPS_PER_CONN: no stage sets it; did you mean NCCL_IB_QPS_PER_CONNECTION?",
        ),
        ("nccl_debug", "nccl_debug: no stage sets it; did you mean NCCL_DEBUG?"),
        (
            "NCCL_ALGO",
            "NCCL_ALGO: no stage sets it; it is unset if the submitting shell exports it. To use it, set it under "
            "environment in the run file",
        ),
        (
            "PATH",
            "PATH: set by Slurm, the container or the image, not by stage train; a run file may not set it",
        ),
        ("Q*", "Q*: no stage sets it"),
        ("A\x1b[31m", "'A\\x1b[31m': no stage sets it"),
    ],
)
def test_an_unknown_name(run_file, name, message):
    found = hpcgen("explain", "-c", run_file, name)
    assert (found.status, found.stdout, found.stderr) == (2, "", f"{message}\n")


def test_a_cluster_alone_serves_every_stage(workplace):
    before = listing(workplace)
    found = hpcgen(
        "explain", "--cluster", "azure-ndv5", "--stage", "nccl-test", "NCCL_NVLS_ENABLE", "UCX_TLS"
    )
    assert found.status == 0
    assert "UCX_TLS=rc  node type" in found.stdout
    assert "--stage train: NCCL_NVLS_ENABLE=0" in found.stdout
    assert hpcgen("explain", "--cluster", "local").status == 0
    assert listing(workplace) == before


def test_data_need_not_exist_but_mistakes_are_reported(workplace):
    path = write_yaml(workplace / "run.yaml", minimal_run(data={"datasets": [{"prefix": "/none/x"}]}))
    assert hpcgen("explain", "-c", path).status == 0
    for wrong, mistake in (
        ("environment.HF_TOKEN=hunter2", "environment.HF_TOKEN looks like a secret"),
        ("share=all", "share = all must be private or group"),
    ):
        found = hpcgen("explain", "-c", path, "--set", wrong)
        assert (found.status, found.stdout) == (2, "")
        assert mistake in found.stderr
        assert "hunter2" not in found.stderr


def test_a_run_or_a_cluster(run_file):
    found = hpcgen("explain", "-c", "run.yaml", "--cluster", "local")
    assert found.status == 2
    assert found.stderr == "-c run.yaml and --cluster local exclude each other; use only one of them\n"


def test_sharp_warns_on_standard_error(run_file):
    arguments = ["explain", "-c", run_file, "--set", "parallelism.use_sharp=true", "--json"]
    found = hpcgen(*arguments, "--set", "container.image=nvcr.io#nvidia/pytorch:25.03-py3")
    assert found.stderr.startswith(
        "warning: --set parallelism.use_sharp: parallelism.use_sharp = true may fail with"
    )
    assert "pytorch:25.03-py3" in found.stderr
    assert [f"warning: {text}" for text in json.loads(found.stdout)["warnings"]] == found.stderr.splitlines()


def test_two_runs_compared(workplace, run_file):
    other = big_run(
        environment={"NCCL_DEBUG": "TRACE", "NCCL_PXN_DISABLE": "0", "OWN": "1"}, secrets=["WANDB_API_KEY"]
    )
    write_yaml(workplace / "other.yaml", other)
    found = hpcgen("explain", "-c", run_file, "--diff", "other.yaml", "--set", "environment.NEW=a b")
    other_line = line_of(workplace / "other.yaml", "PXN")
    assert found.status == 0
    assert found.stdout.splitlines() == [
        "# stage train: differences from other.yaml (33 identical)",
        "+ NEW='a b'  override, --set environment.NEW",
        f"- OWN=1  run file, other.yaml:{other_line + 1}",
        "~ NCCL_PXN_DISABLE",
        f"    - 0  run file, other.yaml:{other_line}",
        "        overrides 1 from the node type (ndv5: ai-infrastructure-on-azure, hopper.conf): "
        "Each GPU uses its own NIC; relaying through a neighbor over NVLink is slower here.",
        "    + 1  node type, ndv5: ai-infrastructure-on-azure, hopper.conf",
        "        Each GPU uses its own NIC; relaying through a neighbor over NVLink is slower here.",
        "+ secret HF_TOKEN",
        "- secret WANDB_API_KEY",
    ]


def test_a_switch_compared_with_the_run_without_it(run_file):
    arguments = ["-c", run_file, "--diff", run_file, "--stage", "nccl-test"]
    found = explained(*arguments, "--set", "parallelism.use_sharp=true")
    assert [variable["name"] for variable in found["added"]] == [
        "NCCL_COLLNET_ENABLE",
        "SHARP_COLL_ENABLE_PCI_RELAXED_ORDERING",
        "SHARP_COLL_ENABLE_SAT",
        "SHARP_COLL_LOG_LEVEL",
        "SHARP_SMX_UCX_INTERFACE",
    ]
    assert (found["removed"], found["changed"]) == ([], [])
    assert found["secrets"] == {"added": [], "removed": []}


def test_two_clusters_compared(workplace):
    found = explained("--cluster", "azure-ndv5", "--diff", "local", "GLOO_*", "TORCH_NCCL_DEBUG*")
    [change] = found["changed"]
    assert (change["before"]["value"], change["after"]["value"]) == ("lo", "eth0")
    assert (change["before"]["layer"], change["after"]["layer"]) == ("cluster", "node type")
    assert [variable["name"] for variable in found["added"]] == ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]


def test_no_difference(run_file):
    found = hpcgen("explain", "-c", run_file, "--diff", run_file, "NCCL_DEBUG")
    assert found.stdout == "stage train: 1 variable, identical to run.yaml\n"
    assert hpcgen("explain", "-c", run_file, "--diff", run_file, "NCCL_DEBUGG").status == 2


def test_no_colors_in_a_pipe(run_file):
    assert "\x1b" not in hpcgen("explain", "-c", run_file).stdout


@pytest.mark.process
def test_a_terminal_gets_colors_and_lines_of_its_width(run_file):
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    command = [sys.executable, "-m", "hpcgen", "explain", "-c", run_file, "NCCL_NET_PLUGIN"]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    subprocess.run(command, stdout=slave, env=environment, check=True, timeout=PATIENCE_S)
    os.close(slave)
    lines = os.read(master, 65536).decode().splitlines()
    os.close(master)
    assert lines[0].startswith(
        "\x1b[1mNCCL_NET_PLUGIN=libnccl-net.so\x1b[0m  node type, fabrics/infiniband: "
    )
    assert len(lines) > 3
    assert all(line.startswith("    ") and len(line) <= 60 for line in lines[1:])
