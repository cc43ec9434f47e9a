"""Cluster profiles: where they are found, what they extend, and whom they may belong to."""

from __future__ import annotations

import grp
import os
from pathlib import Path

import pytest

from hpcgen.config.loader import load_run
from hpcgen.config.profiles import cluster_names, load_cluster, read_profile
from hpcgen.errors import ConfigErrors, HpcgenError
from hpcgen.run_plan.profile import profile_mistakes
from tests.runs import loaded, minimal_run, write_yaml


def test_profiles_extend_one_another_by_name_and_by_path(tmp_path):
    write_yaml(
        tmp_path / "clusters/site.yaml",
        {"extends": "azure-ndv5", "scratch": "/mnt", "environment": {"A": "1"}},
    )
    write_yaml(tmp_path / "team.yaml", {"extends": "./clusters/site.yaml", "environment": {"B": "2"}})
    cluster, node_type = load_cluster("./team.yaml", tmp_path)
    assert (cluster.scratch, cluster.environment) == ("/mnt", {"A": "1", "B": "2"})
    assert cluster.container.runtime == "pyxis"
    assert node_type.gpus_per_node == 8


def test_the_folder_clusters_shadows_and_may_extend_a_shipped_name(tmp_path):
    write_yaml(tmp_path / "clusters/azure-ndv5.yaml", {"extends": "azure-ndv5", "scratch": "/mnt/nvme"})
    cluster, _ = load_cluster("azure-ndv5")
    assert (cluster.scratch, cluster.node_type) == ("/mnt/nvme", "ndv5")


def test_profiles_and_node_types_next_to_the_run_file_come_first(tmp_path):
    for directory, gpus in ((tmp_path, 4), (tmp_path / "project", 2)):
        write_yaml(directory / "topologies/box.yaml", {"extends": "cpu", "description": f"{gpus} here"})
        profile = {"extends": "local", "node_type": "box", "scratch": f"/scratch{gpus}"}
        write_yaml(directory / "clusters/site.yaml", profile)
    write_yaml(tmp_path / "project/run.yaml", minimal_run(cluster="site"))
    run = load_run(tmp_path / "project/run.yaml")
    assert (run.cluster.scratch, run.node_type.description) == ("/scratch2", "2 here")
    assert run.cluster_files[0] == f"{tmp_path}/project/clusters/site.yaml"
    assert run.node_type_files[0] == f"{tmp_path}/project/topologies/box.yaml"
    (tmp_path / "project/clusters/site.yaml").unlink()
    assert load_run(tmp_path / "project/run.yaml").cluster.scratch == "/scratch4"


def test_profiles_of_the_users_configuration(tmp_path):
    write_yaml(tmp_path / "xdg/hpcgen/clusters/mine.yaml", {"extends": "local", "description": "mine"})
    assert load_cluster("mine")[0].description == "mine"
    assert cluster_names() == ["azure-ndv5", "local", "mine"]
    write_yaml(tmp_path / "clusters/mine.yaml", {"extends": "mine", "scratch": "/mnt"})
    assert load_cluster("mine")[0] == load_cluster("./clusters/mine.yaml", tmp_path)[0]


def test_profiles_that_extend_each_other_in_a_cycle(tmp_path):
    write_yaml(tmp_path / "a.yaml", {"extends": "./b.yaml"})
    write_yaml(tmp_path / "b.yaml", {"extends": "./a.yaml"})
    ring = (
        r"b\.yaml:2: extends = \./a\.yaml forms a cycle: \./a\.yaml extends \./b\.yaml extends \./a\.yaml; "
    )
    with pytest.raises(ConfigErrors, match=ring):
        load_cluster("./a.yaml", tmp_path)


def test_a_cycle_without_the_requested_profile(tmp_path):
    for name, parent in (("site", "la"), ("la", "lb"), ("lb", "la")):
        write_yaml(tmp_path / f"clusters/{name}.yaml", {"extends": parent})
    with pytest.raises(ConfigErrors, match="extends = la forms a cycle: la extends lb extends la; remove"):
        load_cluster("site")


def test_a_misspelled_name_gets_a_suggestion(tmp_path):
    with pytest.raises(ConfigErrors) as error:
        load_cluster("azur-ndv5")
    assert error.value.messages == (
        "--cluster azur-ndv5 is not a known cluster profile; did you mean azure-ndv5?",
    )


def test_a_health_command_is_found_on_every_node(tmp_path):
    write_yaml(tmp_path / "site.yaml", {"extends": "local", "health_command": ["check.sh", "-q"]})
    [mistake] = profile_mistakes(read_profile("./site.yaml", tmp_path))
    assert "site.yaml:4: health_command[0] = check.sh is not an absolute path" in str(mistake)
    write_yaml(tmp_path / "site.yaml", {"extends": "local", "health_command": ["/opt/check.sh", "-q"]})
    assert profile_mistakes(read_profile("./site.yaml", tmp_path)) == []


def test_a_missing_parent_is_reported_in_the_child(tmp_path):
    write_yaml(tmp_path / "a.yaml", {"description": "x", "extends": "nothing"})
    with pytest.raises(ConfigErrors, match=r"a\.yaml:3: extends = nothing is not a known cluster profile"):
        load_cluster("./a.yaml", tmp_path)


@pytest.mark.parametrize("name", ["azure-ndv5", "local"])
def test_shipped_profiles_load(name):
    cluster, node_type = load_cluster(name)
    assert cluster.description
    assert node_type.description


def refused(name: str, directory: Path) -> str:
    with pytest.raises(HpcgenError) as error:
        load_cluster(name, directory)
    return str(error.value)


def test_a_profile_that_strangers_could_change_is_refused(tmp_path):
    profile = write_yaml(tmp_path / "clusters/local.yaml", {"extends": "local", "python": "/evil/python"})
    assert load_cluster("local")[0].python == "/evil/python"
    profile.chmod(0o666)
    assert "all users can write to it" in refused("local", tmp_path)
    assert "all users can write to it" in refused("./clusters/local.yaml", tmp_path)
    profile.chmod(0o644)
    profile.parent.chmod(0o1777)
    assert f"chmod o-w {profile.parent}" in refused("local", tmp_path)
    # nobody can replace the user's own file there, and the run file names it
    assert load_cluster("./clusters/local.yaml", tmp_path)[0].python == "/evil/python"
    profile.parent.chmod(0o777)
    assert "all users can write to" in refused("./clusters/local.yaml", tmp_path)
    profile.parent.chmod(0o755)
    write_yaml(tmp_path / "mine.yaml", {"extends": "./clusters/local.yaml"})
    profile.chmod(0o666)
    assert str(profile) in refused("./mine.yaml", tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_strangers_profile_in_the_working_directory_is_refused(tmp_path):
    profile = write_yaml(tmp_path / "clusters/local.yaml", {"extends": "local", "trusted_groups": ["adm"]})
    os.chown(profile, 65534, grp.getgrnam("adm").gr_gid)
    assert "another user (id 65534) owns it" in refused("local", tmp_path)
    assert load_cluster("./clusters/local.yaml", tmp_path)[0].trusted_groups == ("adm",)
    profile.chmod(0o664)
    # the group that it names itself is not trusted with it
    assert "group adm can write to it" in refused("./clusters/local.yaml", tmp_path)


def test_a_node_type_that_strangers_could_change_is_refused(tmp_path):
    facts = write_yaml(tmp_path / "topologies/mine.yaml", {"extends": "cpu"})
    write_yaml(tmp_path / "site.yaml", {"extends": "local", "node_type": "mine"})
    load_cluster("./site.yaml", tmp_path)
    facts.chmod(0o666)
    assert "topologies/mine.yaml: not trusted, because all users can write to it" in refused(
        "./site.yaml", tmp_path
    )


def test_a_run_knows_the_files_of_its_profile_and_node_type(tmp_path):
    write_yaml(tmp_path / "topologies/mine.yaml", {"extends": "cpu"})
    write_yaml(tmp_path / "site.yaml", {"extends": "local", "node_type": "mine"})
    run = loaded(tmp_path, minimal_run(cluster="./site.yaml"))
    assert run.cluster_files == (f"{tmp_path}/site.yaml", "shipped:clusters/local.yaml")
    assert run.node_type_files == (f"{tmp_path}/topologies/mine.yaml", "shipped:topologies/cpu.yaml")


def test_null_removes_what_a_profile_inherits(tmp_path):
    write_yaml(tmp_path / "team.yaml", {"extends": "azure-ndv5", "environment": {"A": "1", "B": "2"}})
    own = {"environment": {"A": None, "C": "3"}, "partitions": {"hpc": None, "gpu": {}}}
    write_yaml(tmp_path / "mine.yaml", {"extends": "./team.yaml", **own})
    cluster, _ = load_cluster("./mine.yaml", tmp_path)
    assert cluster.environment == {"B": "2", "C": "3"}
    assert list(cluster.partitions) == ["gpu"]
    write_yaml(tmp_path / "mine.yaml", {"extends": "./team.yaml", "environment": {"AA": None}})
    assert "environment.AA removes nothing, because no extended file sets it; " in refused(
        "./mine.yaml", tmp_path
    )
    write_yaml(tmp_path / "mine.yaml", {"extends": "./team.yaml", "environment": None})
    assert load_cluster("./mine.yaml", tmp_path)[0].environment == {}
