"""pyxis flags: what the container is shown, and what pyxis would refuse or get wrong without a word."""

from __future__ import annotations

import pytest

from hpcgen.errors import HpcgenError
from hpcgen.planning.container import Container, container_problems, make_container, runtime
from tests.runs import big_run, loaded, minimal_run, planned, write_yaml


def container(
    tmp_path, run=None, reads=(), writes=("/runs/x",), environment=("A",), **site
) -> Container | None:
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", **site})
    found = loaded(tmp_path, big_run(cluster="./site.yaml", container=run or {}))
    assert found.mistakes == ()
    return make_container(found.config, found.cluster, writes=writes, reads=reads, environment=environment)


def problems(tmp_path, run, site=None):
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "container": site or {}})
    found = loaded(tmp_path, big_run(cluster="./site.yaml", container=run))
    return [(problem.path, problem.reason) for problem in container_problems(found.config, found.cluster)]


def test_the_flags_of_a_container():
    flags = Container("nvcr.io#a/b:1", ("/a:/a", "/b:/c:ro"), "/w", False, ("A", "B")).srun_flags()
    assert flags == (
        "--container-image=nvcr.io#a/b:1",
        "--container-mounts=/a:/a,/b:/c:ro",
        "--container-workdir=/w",
        "--no-container-mount-home",
        "--container-readonly",
        "--container-env=A,B",
    )


def test_writable_takes_the_place_of_readonly():
    """pyxis refuses both together; CycleCloud's default is writable, so one is always said."""
    flags = Container("x", (), "/w", True, ()).srun_flags()
    assert "--container-writable" in flags
    assert "--container-readonly" not in flags


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


def test_what_a_stage_reads_and_writes_is_mounted(tmp_path):
    found = container(tmp_path, reads=["/data/a", "/code"], writes=["/runs/x", "/nvme"])
    assert found.mounts == ("/code:/code:ro", "/data/a:/data/a:ro", "/nvme:/nvme", "/runs/x:/runs/x")
    assert found.workdir == "/shared/runs/big"


def test_a_directory_comes_before_what_lies_in_it(tmp_path):
    """Mounts are made in order: /shared read-only after /shared/runs/x would hide it."""
    found = container(tmp_path, reads=["/shared"], writes=["/shared/runs/x"])
    assert found.mounts == ("/shared:/shared:ro", "/shared/runs/x:/shared/runs/x")
    given = {"mounts": [{"source": "/shared/tools"}]}
    found = container(tmp_path, given, reads=["/shared"])
    assert found.mounts == ("/runs/x:/runs/x", "/shared:/shared:ro", "/shared/tools:/shared/tools")


def test_a_mount_that_shows_a_path_already_is_enough(tmp_path):
    given = {"mounts": [{"source": "/shared"}, {"source": "/data/", "read_only": True}]}
    found = container(tmp_path, given, reads=["/shared/a", "/data/b"], writes=["/shared/runs"])
    assert found.mounts == ("/data/:/data/:ro", "/shared:/shared")


def test_a_read_only_mount_is_not_enough_to_write(tmp_path):
    given = {"mounts": [{"source": "/shared", "read_only": True}]}
    found = container(tmp_path, given, writes=["/shared/runs"])
    assert found.mounts == ("/shared:/shared:ro", "/shared/runs:/shared/runs")


def test_a_mount_elsewhere_does_not_show_the_path(tmp_path):
    given = {"mounts": [{"source": "/shared", "target": "/mnt"}]}
    assert container(tmp_path, given, reads=["/shared/a"]).mounts == (
        "/shared:/mnt",
        "/runs/x:/runs/x",
        "/shared/a:/shared/a:ro",
    )


@pytest.mark.parametrize("path", ["/a b", "/a,b", "/a:b", "/a$b", "/"])
def test_what_pyxis_cannot_mount_is_refused(tmp_path, path):
    with pytest.raises(HpcgenError, match="cannot be mounted"):
        container(tmp_path, reads=[path])


def test_a_mount_over_a_path_of_the_host_that_the_stage_needs(tmp_path):
    given = {"mounts": [{"source": "/lustre/x", "target": "/data"}]}
    with pytest.raises(
        HpcgenError, match=r"the stage needs /data of the host, and container\.mounts shows /lustre/x there"
    ):
        container(tmp_path, given, reads=["/data"])


def test_the_runs_values_win_and_its_mounts_are_added(tmp_path):
    site = {"image": "/site.sqsh", "writable": True, "workdir": "/w", "mounts": [{"source": "/site"}]}
    found = container(tmp_path, {"image": "/run.sqsh", "mounts": [{"source": "/run"}]}, container=site)
    assert (found.image, found.writable, found.workdir) == ("/run.sqsh", True, "/w")
    assert {"/site:/site", "/run:/run"} <= set(found.mounts)
    assert container(tmp_path, {"writable": False, "workdir": "/v"}, container=site).workdir == "/v"
    assert container(tmp_path, {"writable": False}, container=site).writable is False


def test_runtime_none_has_no_container(tmp_path):
    assert container(tmp_path, {"runtime": "none"}) is None
    run = loaded(tmp_path, minimal_run())
    assert runtime(run.config, run.cluster) == "none"


def test_settings_without_effect_are_refused(tmp_path):
    given = {"runtime": "none", "image": "/x.sqsh", "workdir": "/w", "mounts": [{"source": "/a"}]}
    assert problems(tmp_path, given) == [
        ("container.image", "has no effect with runtime none"),
        ("container.workdir", "has no effect with runtime none"),
        ("container.mounts", "have no effect with runtime none"),
    ]
    assert problems(tmp_path, {"runtime": "none"}) == []


def test_pyxis_needs_an_image(tmp_path):
    assert problems(tmp_path, {}, {"image": None}) == [("container.image", "is missing")]
    assert problems(tmp_path, {"image": "/x.sqsh"}, {"image": None}) == []


def test_two_mounts_on_one_target(tmp_path):
    """pyxis accepts them and takes one without a word."""
    reason = "is the target of another mount; pyxis would take one of them silently"
    given = {"mounts": [{"source": "/a", "target": "/t"}, {"source": "/t"}, {"source": "/b", "target": "/s"}]}
    found = problems(tmp_path, given, {"mounts": [{"source": "/s"}]})
    assert found == [("container.mounts[1].source", reason), ("container.mounts[2].target", reason)]
    assert problems(tmp_path, {"mounts": [{"source": "/a"}, {"source": "/a", "target": "/b"}]}) == []
