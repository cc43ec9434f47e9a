"""defaults.yaml of the user and of the site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hpcgen
from hpcgen.config.document import FilePlace
from hpcgen.config.loader import load_cluster_run
from hpcgen.config.profiles import read_profile
from hpcgen.errors import FileErrors, HpcgenError
from tests.cli import command
from tests.runs import loaded, minimal_run, refused, write_yaml

IMAGE = "/sw/images/pytorch-25.03.sqsh"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site's directory with a profile without an account and an image, and with defaults for both."""
    site = tmp_path / "site"
    write_yaml(site / "clusters/orion.yaml", {"extends": "azure-ndv5"})
    write_yaml(site / "defaults.yaml", {"cluster": "orion", "account": "common", "image": IMAGE})
    monkeypatch.setenv("HPCGEN_SITE", str(site))
    return site


def on_orion(**sections: Any) -> dict[str, Any]:
    """A run for nodes with 8 GPUs."""
    training = minimal_run()["training"] | {"global_batch_size": 8}
    return minimal_run(**{"training": training, "slurm": {"train": {"time": "1:00:00"}}, **sections})


def without_cluster(**sections: Any) -> dict[str, Any]:
    """A run for nodes with 8 GPUs, which names no profile."""
    values = on_orion(**sections)
    del values["cluster"]
    return values


def test_defaults_apply_where_no_file_sets_a_value(site: Path, tmp_path: Path) -> None:
    run = loaded(tmp_path, without_cluster())
    assert (run.cluster_name, run.cluster.slurm.account, run.cluster.container.image) == (
        "orion",
        "common",
        IMAGE,
    )
    assert run.cluster.slurm.partition == "hpc"
    assert run.document.origin("cluster") == FilePlace(f"{site}/defaults.yaml", 2)
    script = hpcgen.render(hpcgen.plan(run), "train")
    assert "#SBATCH --account=common\n" in script
    assert f"image={IMAGE}\n" in script
    places = ", ".join(
        f"{key} {site}/defaults.yaml:{line}" for line, key in enumerate(("cluster", "account", "image"), 2)
    )
    assert f"\n# defaults: {places}\n" in script


def test_run_files_and_profiles_of_the_site_override_them(site: Path, tmp_path: Path) -> None:
    own = {"slurm": {"account": "orion"}, "container": {"image": "/orion.sqsh"}}
    write_yaml(site / "clusters/orion.yaml", {"extends": "azure-ndv5", **own})
    cluster = loaded(tmp_path, without_cluster()).cluster
    assert (cluster.slurm.account, cluster.container.image) == ("orion", "/orion.sqsh")
    slurm = {"defaults": {"account": "mine", "time": "1:00:00"}}
    values = on_orion(cluster="azure-ndv5", slurm=slurm, container={"image": "/mine.sqsh"})
    script = hpcgen.render(hpcgen.plan(loaded(tmp_path, values)), "train")
    assert "#SBATCH --account=mine\n" in script
    assert "image=/mine.sqsh\n" in script
    assert "# defaults: " not in script


def test_the_users_defaults_override_the_sites_one_by_one(site: Path, tmp_path: Path) -> None:
    write_yaml(tmp_path / "xdg/hpcgen/defaults.yaml", {"account": "mine"})
    run = loaded(tmp_path, without_cluster())
    assert (run.cluster_name, run.cluster.slurm.account) == ("orion", "mine")
    assert read_profile("orion").document.origin("slurm.account") == f"{tmp_path}/xdg/hpcgen/defaults.yaml:2"


def test_a_default_image_does_not_make_a_container(site: Path, tmp_path: Path) -> None:
    script = hpcgen.render(hpcgen.plan(loaded(tmp_path, minimal_run())), "train")
    assert f"\n# defaults: account {site}/defaults.yaml:3\n" in script
    assert IMAGE not in script


def test_the_path_of_a_profile_is_relative_to_the_file(site: Path, tmp_path: Path) -> None:
    write_yaml(site / "defaults.yaml", {"cluster": "clusters/orion.yaml"})
    assert loaded(tmp_path, without_cluster()).config.cluster == f"{site}/clusters/orion.yaml"


def test_a_run_file_without_a_cluster_is_told_where_to_name_one(tmp_path: Path) -> None:
    [problem] = refused(tmp_path, without_cluster())
    assert str(problem) == (
        f"{tmp_path}/run.yaml: cluster is missing; name a profile of hpcgen cluster list here, or for all run files in "
        f"{tmp_path}/xdg/hpcgen/defaults.yaml"
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"acount": "x"}, "defaults.yaml:2: acount = x is not a known key; did you mean account?"),
        ({"cluster": 7}, "defaults.yaml:2: cluster = 7 must be text (quote it)"),
        ({"image": "docker://x"}, "defaults.yaml:2: image = docker://x must be "),
        ({"requires_hpcgen": "0.3"}, 'requires_hpcgen = "0.3" must be a minimum version of hpcgen such as '),
        ({"secrets": ["HF_TOKEN"]}, 'defaults.yaml:2: secrets = ["HF_TOKEN"] is not a known key; '),
    ],
)
def test_mistakes_name_the_file(values: dict[str, Any], message: str, site: Path) -> None:
    write_yaml(site / "defaults.yaml", values)
    with pytest.raises(FileErrors) as error:
        load_cluster_run("local", "/runs/x")
    assert message in str(error.value)


def test_a_file_that_others_can_write_to_is_refused(site: Path) -> None:
    (site / "defaults.yaml").chmod(0o666)
    with pytest.raises(HpcgenError, match=f"chmod o-w {site}/defaults.yaml"):
        read_profile("local")


@pytest.mark.parametrize("version", [">=9", ">=0.99", ">=0.2.99"])
def test_an_old_hpcgen_is_refused_and_says_nothing_else(version: str, site: Path, tmp_path: Path) -> None:
    """Other mistakes may only be keys of the newer version."""
    [problem] = refused(tmp_path, minimal_run(requires_hpcgen=version, optimiser={}))
    assert problem.subject == f'requires_hpcgen = "{version}"'
    assert problem.reason == f"excludes this hpcgen, which is {hpcgen.__version__}"
    assert problem.where == f"{tmp_path}/run.yaml:{_line(tmp_path / 'run.yaml', 'requires')}"
    write_yaml(site / "defaults.yaml", {"requires_hpcgen": version, "new_key": 1})
    [problem] = refused(tmp_path, minimal_run())
    assert problem.where == f"{site}/defaults.yaml:2"
    write_yaml(tmp_path / "xdg/hpcgen/defaults.yaml", {"requires_hpcgen": ">=0.1"})  # lifts nothing
    assert refused(tmp_path, minimal_run()) == (problem,)


def _line(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize("version", [">=0", ">=0.2", f">={hpcgen.__version__}"])
def test_a_new_hpcgen_goes_on(version: str, tmp_path: Path) -> None:
    assert loaded(tmp_path, minimal_run(requires_hpcgen=version)).config.requires_hpcgen == version


def test_explain_and_init_use_them(site: Path, tmp_path: Path) -> None:
    found = command.hpcgen("init", "new.yaml", "--preset", "1.3b")
    assert found.status == 0, found.stderr
    assert "\ncluster: orion\n" in (tmp_path / "new.yaml").read_text()
    write_yaml(tmp_path / "run.yaml", without_cluster())
    explained = json.loads(command.hpcgen("explain", "--json").stdout)["defaults"]
    assert explained == {
        "cluster": {"value": "orion", "origin": f"{site}/defaults.yaml:2"},
        "account": {"value": "common", "origin": f"{site}/defaults.yaml:3"},
        "image": {"value": IMAGE, "origin": f"{site}/defaults.yaml:4"},
    }
    assert f"\nimage: {IMAGE}  {site}/defaults.yaml:4\n" in command.hpcgen("explain").stdout
