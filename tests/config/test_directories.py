"""The site's directory: HPCGEN_SITE, and the directory of a profile that is named by its path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import hpcgen
from hpcgen.config.profiles import cluster_names, load_cluster, read_profile
from hpcgen.errors import HpcgenError
from tests.runs import loaded, minimal_run, write_yaml

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
STRANGER = 65534


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site directory with a profile that extends another one, a node type and a template."""
    site = tmp_path / "sw/hpcgen"
    write_yaml(site / "clusters/uni.yaml", {"extends": "local", "node_type": "box", "scratch": "/uni"})
    write_yaml(site / "clusters/orion.yaml", {"extends": "uni", "description": "Orion"})
    write_yaml(site / "topologies/box.yaml", {"extends": "crate", "description": "a box"})
    write_yaml(site / "topologies/crate.yaml", {"extends": "cpu", "description": "a crate"})
    template = site / "templates/slurm/train.sbatch.j2"
    template.parent.mkdir(parents=True)
    template.write_text(
        '{% extends "hpcgen/slurm/train.sbatch.j2" %}\n'
        "{% block site %}\n{{ super() }}\nsite_prologue() { say hello; }\n{% endblock %}\n"
    )
    return site


@pytest.mark.process  # bash checks the script
def test_the_variable_names_the_sites_directory(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "orion" not in cluster_names()
    monkeypatch.setenv("HPCGEN_SITE", str(site))
    assert {"orion", "uni"} < set(cluster_names())
    run = loaded(tmp_path, minimal_run(cluster="orion"))
    assert (run.cluster.scratch, run.node_type.description) == ("/uni", "a box")
    assert "site_prologue() { say hello; }" in hpcgen.render(hpcgen.plan(run), "train")
    monkeypatch.setenv("HPCGEN_SITE", "")
    assert "orion" not in cluster_names()


def test_the_users_files_come_before_the_sites(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCGEN_SITE", str(site))
    write_yaml(tmp_path / "xdg/hpcgen/clusters/uni.yaml", {"extends": "uni", "scratch": "/mine"})
    assert load_cluster("orion")[0].scratch == "/mine"
    write_yaml(tmp_path / "clusters/uni.yaml", {"extends": "uni", "scratch": "/here"})
    assert load_cluster("orion")[0].scratch == "/here"


@pytest.mark.process  # bash checks the script
def test_a_profile_named_by_its_path_finds_the_files_of_its_site(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    write_yaml(other / "clusters/uni.yaml", {"extends": "local", "scratch": "/other"})
    monkeypatch.setenv("HPCGEN_SITE", str(other))
    run = loaded(tmp_path, minimal_run(cluster=f"{site}/clusters/orion.yaml"))
    assert run.cluster.scratch == "/uni"
    assert [Path(file).name for file in run.cluster_files] == ["orion.yaml", "uni.yaml", "local.yaml"]
    assert run.node_type_files[:2] == (f"{site}/topologies/box.yaml", f"{site}/topologies/crate.yaml")
    assert f"{site}/templates/slurm/train.sbatch.j2" in hpcgen.render(hpcgen.plan(run), "train")
    # a file elsewhere extends it by its path
    write_yaml(tmp_path / "mine.yaml", {"extends": "./sw/hpcgen/clusters/orion.yaml"})
    assert read_profile("./mine.yaml", tmp_path).node_type.description == "a box"


def test_a_missing_file_of_the_site_is_compared_with_those_that_it_has(site: Path) -> None:
    write_yaml(site / "clusters/orion.yaml", {"extends": "unii"})
    with pytest.raises(HpcgenError, match=r"orion\.yaml:2: extends = unii .*; did you mean uni\?"):
        load_cluster(f"{site}/clusters/orion.yaml")
    write_yaml(site / "clusters/orion.yaml", {"extends": "local", "node_type": "boxx"})
    with pytest.raises(HpcgenError, match=r"orion\.yaml:3: node_type = boxx .*; did you mean box\?"):
        load_cluster(f"{site}/clusters/orion.yaml")


def refused(name: str = "orion") -> str:
    with pytest.raises(HpcgenError) as error:
        load_cluster(name)
    return str(error.value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("sw/hpcgen", "HPCGEN_SITE = sw/hpcgen: not an absolute path; load the module that sets it again"),
        ("/no/such", "HPCGEN_SITE = /no/such: no such directory; "),
        ("{site}:/etc/hpcgen", "no such directory; load the module that sets it again, or set it to one dir"),
    ],
)
def test_a_value_that_is_no_directory_is_not_ignored(
    value: str, reason: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCGEN_SITE", value.format(site=site))
    assert reason in refused("local")


def test_a_site_directory_that_others_can_write_to_is_refused(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCGEN_SITE", str(site))
    for path in (site, site / "clusters", site / "clusters/uni.yaml", site.parent):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        assert f"chmod o-w {path}" in refused()
        path.chmod(mode)
    link = site.parents[1] / "links/site"
    link.parent.mkdir()
    link.symlink_to(site)
    monkeypatch.setenv("HPCGEN_SITE", str(link))
    assert load_cluster("orion")[0].scratch == "/uni"
    link.parent.chmod(0o777)
    assert f"chmod o-w {link.parent}" in refused()
    monkeypatch.setenv("HPCGEN_SITE", str(site))
    site.chmod(0o1777)  # anyone could add what is missing
    assert f"chmod o-w {site}" in refused()


@needs_root
def test_a_site_directory_may_belong_to_another_user_but_not_to_a_group(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCGEN_SITE", str(site))
    for path in (site, *site.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
    assert load_cluster("orion")[0].scratch == "/uni"
    site.chmod(0o775)
    assert f"{site}: not trusted, because another user (id {STRANGER}) owns it and group" in refused()


@needs_root
def test_what_a_stranger_adds_to_a_directory_for_all_is_refused(site: Path, tmp_path: Path) -> None:
    """In /tmp, for example, another user can make the directories next to one's own run file."""
    for path in (site / "topologies", site / "topologies/box.yaml"):
        os.chown(path, STRANGER, -1)
    assert load_cluster(f"{site}/clusters/orion.yaml")[1].description == "a box"
    site.chmod(0o1777)
    reason = f"not trusted, because another user (id {STRANGER}) owns it and others can write to {site}"
    assert f"{site}/topologies: {reason}" in refused(f"{site}/clusters/orion.yaml")
    os.chown(site / "topologies", 0, -1)
    os.chown(site / "templates", STRANGER, -1)
    run = loaded(tmp_path, minimal_run(cluster=f"{site}/clusters/orion.yaml"))
    with pytest.raises(HpcgenError, match="owns it and others can write to"):
        hpcgen.render(hpcgen.plan(run), "train")
