"""Containers: the words that start one, and what the runtimes would refuse or get wrong without a word."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess

import pytest
import tomllib
import yaml

from hpcgen.config.container import Mount
from hpcgen.config.fabric import load_fabric
from hpcgen.errors import ConfigErrors, HpcgenError, Problem
from hpcgen.planning.container import (
    container_problems,
    container_warnings,
    image_reference,
    make_container,
    not_run_warnings,
)
from hpcgen.planning.runtimes import APPTAINER_START, CONTAINER_NAME, Container, environment_file
from hpcgen.planning.software import runtime
from tests.patience import PATIENCE_S
from tests.runs import big_run, loaded, minimal_run, planned, write_yaml

DIGEST = f"sha256:{'0123456789abcdef' * 4}"


def load(tmp_path, run=None, **site):
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", **site})
    return loaded(tmp_path, big_run(cluster="./site.yaml", container=run or {}))


def container(
    tmp_path, run=None, reads=(), writes=("/runs/x",), environment=("A",), **site
) -> Container | None:
    found = load(tmp_path, run, **site)
    return make_container(found.config, found.cluster, writes=writes, reads=reads, environment=environment)


def mounts(found: Container) -> tuple[str, ...]:
    """The mounts in pyxis's form."""
    option = found.words()[1]
    assert option.startswith("--container-mounts=")
    return tuple(option.partition("=")[2].split(","))


def example(**changes) -> Container:
    values = {
        "runtime": "pyxis",
        "image": "/images/gpt.sqsh",
        "mounts": (Mount(source="/a", target="/a"), Mount(source="/b", target="/c", read_only=True)),
        "workdir": "/w",
        "writable": False,
        "environment": ("A", "B"),
        "copy_image": False,
    }
    return Container(**{**values, **changes})


def problems(tmp_path, run, site=None) -> list[Problem]:
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "container": site or {}})
    found = loaded(tmp_path, big_run(cluster="./site.yaml", container=run))
    return list(container_problems(found.config, found.cluster))


def warnings(tmp_path, run=None, **site) -> list[Problem]:
    found = load(tmp_path, run, **site)
    return list(container_warnings(found.config, found.cluster))


def test_pyxis_options():
    """The image is the first word, which a copy on the node replaces."""
    assert example().words() == (
        "--container-image=/images/gpt.sqsh",
        "--container-mounts=/a:/a,/b:/c:ro",
        "--container-workdir=/w",
        "--no-container-mount-home",
        "--container-readonly",
        "--container-env=A,B",
    )


def test_writable_takes_the_place_of_readonly():
    """pyxis refuses both together. CycleCloud's default is writable, so one is always set."""
    words = example(writable=True).words()
    assert "--container-writable" in words
    assert "--container-readonly" not in words


@pytest.fixture
def enroot_task(tmp_path):
    """Starts a task's command in a container: a stand-in for enroot notes its options, and when it starts and ends."""
    program = tmp_path / "enroot"
    program.write_text(
        f"""#!/bin/bash
exec 9>&-  # as enroot does: it closes all that was open
echo begin >>{tmp_path}/log
sleep 0.3
while [ "$1" != {CONTAINER_NAME} ]; do echo "$1"; shift; done
shift
echo end >>{tmp_path}/log
exec "$@"
"""
    )
    program.chmod(0o700)

    def start(container: Container, local_id: int, *command: str) -> subprocess.Popen[str]:
        environment = {
            "PATH": f"{tmp_path}:{os.defpath}",
            "ENROOT_DATA_PATH": str(tmp_path),
            "SLURM_STEP_ID": "0",
            "SLURM_LOCALID": str(local_id),
            "CUDA_VISIBLE_DEVICES": "0",
        }
        words = [*container.words(), *command]
        return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)

    return start


@pytest.mark.process
@pytest.mark.parametrize("writable", [False, True])
def test_the_task_passes_its_slurm_variables_to_enroot(tmp_path, enroot_task, writable):
    """enroot passes no variable that is not named, and which ones Slurm set is known in the task alone."""
    found = example(runtime="enroot", writable=writable, workdir=str(tmp_path))
    with enroot_task(found, 3, "pwd") as task:
        said, *options, directory = task.stdout.read().splitlines()
    assert task.returncode == 0
    assert directory == str(tmp_path)
    assert said == "start"
    first_mount = next(index for index, word in enumerate(options) if word.startswith(("--mount", "--rw")))
    of_slurm = set(options[:first_mount]) - {"--env"}
    assert {"CUDA_VISIBLE_DEVICES", "SLURM_LOCALID", "SLURM_STEP_ID"} <= of_slurm
    assert "PATH" not in of_slurm
    assert options[first_mount:] == [
        *(["--rw"] if writable else []),
        "--mount=/a:/a:none:x-create=auto,rbind",
        "--mount=/b:/c:none:x-create=auto,rbind,ro",
        "--env=A",
        "--env=B",
    ]


@pytest.mark.process
def test_the_tasks_of_a_node_start_one_after_another(tmp_path, enroot_task):
    """enroot's own lock gives up after 30 s, and its hooks may need longer for the GPUs of eight tasks."""
    found = example(runtime="enroot", workdir=str(tmp_path))
    tasks = [enroot_task(found, local_id, "sleep", "1") for local_id in range(4)]
    for task in tasks:
        with task:
            assert task.wait(timeout=PATIENCE_S) == 0
    assert (tmp_path / "log").read_text().split() == ["begin", "end"] * 4


@pytest.mark.parametrize(
    ("given", "rendered"),
    [
        ("/images/a.sqsh", "/images/a.sqsh"),
        ("nvcr.io#nvidia/pytorch:25.03-py3", "nvcr.io#nvidia/pytorch:25.03-py3"),
        (f"nvcr.io#nvidia/pytorch:25.03-py3@{DIGEST}", f"nvcr.io#nvidia/pytorch:{DIGEST}"),
        (f"nvcr.io#nvidia/pytorch@{DIGEST}", f"nvcr.io#nvidia/pytorch:{DIGEST}"),
        (f"registry:5000#a/b:1@{DIGEST}", f"registry:5000#a/b:{DIGEST}"),
        ("registry:5000#a/b", "registry:5000#a/b"),
    ],
)
def test_a_digest_is_written_in_the_form_that_every_enroot_accepts(given, rendered):
    assert image_reference(given) == rendered
    # the form that enroot 3.4 knows (src/docker.sh); 4.0 and newer take it as well
    user, tag = r"[A-Za-z0-9_.!~*'()%;:&=+$,-@]+", r"[A-Za-z0-9._:-]+"
    old = rf"docker://({user}@)?([^#]+#)?[a-z0-9/._-]+(:{tag})?"
    assert given.endswith(".sqsh") or re.fullmatch(old, f"docker://{rendered}")


def test_every_variable_that_the_script_sets_is_named(tmp_path):
    """A value in the image wins over the job's unless the variable is named in --container-env."""
    stage = planned(tmp_path, big_run(secrets=["HF_TOKEN"])).stages["train"]
    names = set(stage.container.environment)
    assert {variable.name for variable in stage.environment} <= names
    assert {
        "MASTER_ADDR",
        "MASTER_PORT",
        "WORLD_SIZE",
        "TRAINER_CONFIG",
        "TRAINER_STOP_FILE",
        "HF_TOKEN",
    } <= names
    assert "PATH" not in names
    assert list(stage.container.environment) == sorted(names)


def test_paths_that_a_stage_reads_or_writes_are_mounted(tmp_path):
    found = container(tmp_path, reads=["/data/a", "/code"], writes=["/runs/x", "/nvme"])
    assert mounts(found) == ("/code:/code:ro", "/data/a:/data/a:ro", "/nvme:/nvme", "/runs/x:/runs/x")
    assert found.workdir == "/shared/runs/big"


def test_a_directory_is_mounted_before_its_contents(tmp_path):
    """Mounts are made in order: /shared read-only after /shared/runs/x would hide it."""
    found = container(tmp_path, reads=["/shared"], writes=["/shared/runs/x"])
    assert mounts(found) == ("/shared:/shared:ro", "/shared/runs/x:/shared/runs/x")
    given = {"mounts": [{"source": "/shared/tools"}]}
    found = container(tmp_path, given, reads=["/shared"])
    assert mounts(found) == ("/runs/x:/runs/x", "/shared:/shared:ro", "/shared/tools:/shared/tools")


def test_a_mount_that_shows_a_path_already_is_enough(tmp_path):
    given = {"mounts": [{"source": "/shared"}, {"source": "/data/", "read_only": True}]}
    found = container(tmp_path, given, reads=["/shared/a", "/data/b"], writes=["/shared/runs"])
    assert mounts(found) == ("/data/:/data/:ro", "/shared:/shared")


def test_a_read_only_mount_is_not_enough_to_write(tmp_path):
    given = {"mounts": [{"source": "/shared", "read_only": True}]}
    found = container(tmp_path, given, writes=["/shared/runs"])
    assert mounts(found) == ("/shared:/shared:ro", "/shared/runs:/shared/runs")


def test_a_mount_elsewhere_does_not_show_the_path(tmp_path):
    given = {"mounts": [{"source": "/shared", "target": "/mnt"}]}
    assert mounts(container(tmp_path, given, reads=["/shared/a"])) == (
        "/shared:/mnt",
        "/runs/x:/runs/x",
        "/shared/a:/shared/a:ro",
    )


@pytest.mark.parametrize("path", ["/a b", "/a,b", "/a:b", "/a$b", "/"])
def test_paths_that_pyxis_cannot_mount_are_refused(tmp_path, path):
    with pytest.raises(HpcgenError, match="cannot be mounted"):
        container(tmp_path, reads=[path])


def test_a_mount_over_a_path_of_the_host_that_the_stage_needs(tmp_path):
    given = {"mounts": [{"source": "/lustre/x", "target": "/data"}]}
    with pytest.raises(
        HpcgenError, match=r"the stage needs the host's /data, but container\.mounts mounts /lustre/x there"
    ):
        container(tmp_path, given, reads=["/data"])


def test_the_runs_values_win_and_its_mounts_are_added(tmp_path):
    site = {"image": "/site.sqsh", "writable": True, "workdir": "/w", "mounts": [{"source": "/site"}]}
    found = container(tmp_path, {"image": "/run.sqsh", "mounts": [{"source": "/run"}]}, container=site)
    assert (found.image, found.writable, found.workdir) == ("/run.sqsh", True, "/w")
    assert {"/site:/site", "/run:/run"} <= set(mounts(found))
    assert container(tmp_path, {"writable": False, "workdir": "/v"}, container=site).workdir == "/v"
    assert container(tmp_path, {"writable": False}, container=site).writable is False


def test_runtime_none_has_no_container(tmp_path):
    assert container(tmp_path, {"runtime": "none"}) is None
    run = loaded(tmp_path, minimal_run())
    assert runtime(run.config, run.cluster) == "none"


REFUSED = {
    "settings without a container": (
        {
            "run": {"runtime": "none", "image": "/x.sqsh", "workdir": "/w", "mounts": [{"source": "/a"}]}
            | {"copy_image": True, "writable": True, "environment": "ngc", "annotations": {"a": "b"}}
        },
        [
            f"container.{key}"
            for key in ("image", "copy_image", "mounts", "writable", "workdir", "environment", "annotations")
        ],
    ),
    "pyxis without an image": (
        {"run": {"runtime": "pyxis"}, "site": {"image": None}},
        ["container.image"],
    ),
    "enroot without an image": (
        {"run": {"runtime": "enroot"}, "site": {"image": None}},
        ["container.image"],
    ),
    "enroot with an image of a registry": ({"run": {"runtime": "enroot"}}, ["container.image"]),
    "apptainer without an image": (
        {"run": {"runtime": "apptainer"}, "site": {"image": None}},
        ["container.image"],
    ),
    "apptainer with an image of a registry": ({"run": {"runtime": "apptainer"}}, ["container.image"]),
    "apptainer with the image of enroot": (
        {"run": {"runtime": "apptainer", "image": "/x.sqsh"}},
        ["container.image"],
    ),
    "pyxis with the image of apptainer": ({"run": {"image": "/x.sif"}}, ["container.image"]),
    "ce without an image": ({"run": {"runtime": "ce"}, "site": {"image": None}}, ["container.image"]),
    "a copy that ce does not start": (
        {"run": {"runtime": "ce", "image": "/x.sqsh", "copy_image": True}},
        ["container.copy_image"],
    ),
    "settings of ce with pyxis": (
        {"run": {"environment": "ngc"}, "site": {"annotations": {"com.hooks.cxi.enabled": "true"}}},
        ["container.annotations", "container.environment"],
    ),
    "an annotation below another": (
        {
            "run": {"runtime": "ce", "annotations": {"com.hooks.cxi": "true"}},
            "site": {"annotations": {"com.hooks.cxi.enabled": "true"}},
        },
        ["container.annotations.com.hooks.cxi"],
    ),
    "a copy of an image of a registry": ({"run": {"copy_image": True}}, ["container.copy_image"]),
    # pyxis accepts two mounts on one target and takes one without a word
    "two mounts on one target": (
        {
            "run": {
                "mounts": [
                    {"source": "/a", "target": "/t"},
                    {"source": "/t"},
                    {"source": "/b", "target": "/s"},
                ]
            },
            "site": {"mounts": [{"source": "/s"}]},
        },
        ["container.mounts[1].source", "container.mounts[2].target"],
    ),
}


@pytest.mark.parametrize(("settings", "paths"), REFUSED.values(), ids=REFUSED)
def test_what_the_runtimes_would_refuse_or_ignore(tmp_path, settings, paths):
    assert [problem.path for problem in problems(tmp_path, **settings)] == paths


@pytest.mark.parametrize(
    "settings",
    [
        {"run": {"runtime": "none"}},
        {"run": {"runtime": "pyxis", "image": "/x.sqsh"}, "site": {"image": None}},
        {"run": {"runtime": "enroot", "image": "/x.sqsh"}, "site": {"image": None}},
        {"run": {"copy_image": True, "image": "/x.sqsh"}},
        {"run": {"copy_image": False}, "site": {"copy_image": True}},
        {"run": {"runtime": "apptainer", "image": "/x.sif", "copy_image": True}},
        {"run": {"runtime": "ce"}},
        {"run": {"runtime": "ce", "environment": "/edf/ngc.toml"}, "site": {"image": None}},
        # of the profile, for runs that keep its runtime
        {"run": {"runtime": "pyxis"}, "site": {"runtime": "ce", "environment": "ngc"}},
        {"run": {"mounts": [{"source": "/a"}, {"source": "/a", "target": "/b"}]}},
    ],
)
def test_valid_settings_pass(tmp_path, settings):
    assert problems(tmp_path, **settings) == []


@pytest.mark.parametrize(
    "key",
    [
        "image: docker://a/b:1",
        "image: oras://a/b:1",
        "image: x.sif",
        "environment: ./a.toml",
        "environment: a.toml",
        "environment: '/a$B.toml'",
        "annotations: {'a b': c}",
        "annotations: {a: 'say \"x\"'}",
    ],
)
def test_values_that_no_runtime_reads_are_refused(tmp_path, key):
    name, _, value = key.partition(": ")
    with pytest.raises(ConfigErrors, match=rf"container\.{name}"):
        load(tmp_path, {"runtime": "ce", name: yaml.safe_load(value)})


def test_others_in_a_shared_run_could_replace_the_file_of_ce(tmp_path):
    found = load(tmp_path, {"runtime": "ce"})
    shared = dataclasses.replace(found.config, share="group")
    assert [problem.path for problem in container_problems(shared, found.cluster)] == ["container.runtime"]


@pytest.mark.parametrize("runtime", ["apptainer", "ce"])
def test_a_runtime_that_was_not_run_says_so(tmp_path, runtime):
    found = load(tmp_path, {"runtime": runtime})
    [warning] = not_run_warnings(found.config, found.cluster)
    assert (warning.path, warning.file) == ("container.runtime", "run")
    assert "2026-08" in warning.reason


def test_apptainer_mounts_nothing_by_itself_and_gets_names_alone():
    words = example(runtime="apptainer", image="/i.sif", uses_gpus=True).words()
    assert words[:3] == ("bash", "-c", APPTAINER_START)
    assert words[4:] == (
        *("A", "B", "--", "--no-eval", "--no-mount=home,cwd", "--pwd=/w", "--nv"),
        *("--bind=/a:/a", "--bind=/b:/c:ro", "/i.sif"),
    )


def test_the_file_of_ce_is_toml_with_all_settings():
    annotations = {"com.hooks.cxi.enabled": "true", "com.hooks.ssh.port": "${PORT} # 'x'"}
    text = environment_file(example(runtime="ce", image="nvcr.io#a/b:1", annotations=annotations))
    assert tomllib.loads(text) == {
        "image": "nvcr.io#a/b:1",
        "workdir": "/w",
        "writable": False,
        "mounts": ["/a:/a", "/b:/c:ro"],
        "annotations": {"com": {"hooks": {"cxi": {"enabled": "true"}, "ssh": {"port": "${PORT} # 'x'"}}}},
    }


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"enabled": "true", "variant": "cuda-dl"}),
        (
            {"annotations": {"com.hooks.aws_ofi_nccl.variant": "cuda12"}},
            {"enabled": "true", "variant": "cuda12"},
        ),
        ({"environment": "ngc"}, None),
    ],
    ids=["the fabric's", "another variant", "the site's own file"],
)
def test_ce_enables_the_networks_plugin_unless_the_sites_file_does(tmp_path, own, expected):
    """The plugin of nodes with Slingshot."""
    found = load(tmp_path, {"runtime": "ce", **own})
    fabric = load_fabric("slingshot")
    made = make_container(found.config, found.cluster, writes=(), reads=(), environment=(), fabric=fabric)
    read = tomllib.loads(environment_file(made))
    assert (
        read["annotations"]["com"]["hooks"]["aws_ofi_nccl"] if expected else read.get("annotations")
    ) == expected


def test_a_profile_has_images_copied_to_the_nodes(tmp_path):
    assert container(tmp_path, {"image": "/x.sqsh"}, container={"copy_image": True}).copy_image is True


WARNED = {
    "an image without the trainer": ({}, ["container.image"]),
    "an image that can change": ({"run": {"image": "reg.io#a/b:1"}}, ["container.image"]),
}


@pytest.mark.parametrize(("settings", "paths"), WARNED.values(), ids=WARNED)
def test_images_that_may_not_be_what_is_meant(tmp_path, settings, paths):
    assert [problem.path for problem in warnings(tmp_path, **settings)] == paths


@pytest.mark.parametrize(
    "settings",
    [
        {"code_dir": "/shared/code"},
        {"run": {"image": "/images/gpt.sqsh"}},
        {"run": {"image": f"reg.io#a/b:1@{DIGEST}"}},
    ],
)
def test_images_without_a_warning(tmp_path, settings):
    assert warnings(tmp_path, **settings) == []
