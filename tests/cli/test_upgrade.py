"""What an upgrade of hpcgen changes for a run: `explain --diff` with a script or the record of an older version."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcgen.config.node_types import load_node_type, node_type_names
from hpcgen.config.profiles import cluster_names, load_cluster
from hpcgen.resources import RELEASES, as_of, shipped
from hpcgen.run_plan.release import read_release, release_names
from tests.cli.command import hpcgen
from tests.releases import write_record
from tests.runs import write_yaml

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts/train-0.2.0.sbatch"
"""Rendered by hpcgen 0.2.0 for RUN."""
RUN = {
    "name": "demo",
    "cluster": "azure-ndv5",
    "preset": "1.3b",
    "paths": {"run_dir": "/shared/runs/demo"},
    "slurm": {"train": {"nodes": 2, "time": "1-00:00:00"}},
    "data": {"mock": True},
}


@pytest.fixture
def run_file(workplace: Path) -> Path:
    return write_yaml(workplace / "run.yaml", RUN)


def differences(other: object, *options: str) -> dict[str, Any]:
    found = hpcgen("explain", "--diff", other, "--json", *options)
    assert found.status == 0, found.stderr
    return dict(json.loads(found.stdout))


def test_a_script_of_an_older_version_is_compared_with_todays(run_file: Path, workplace: Path) -> None:
    found = differences(SCRIPT)
    assert found["same"] + len(found["changed"]) + len(found["removed"]) == 33
    # it did not unset what the submitting shell exports of Slurm
    assert "SLURM_*" in found["settings"]["leaks"]["added"]
    assert "drop_leaks" in found["functions"]
    assert "environment" not in found["functions"]


def test_each_kind_of_change_is_found(run_file: Path, workplace: Path) -> None:
    now = hpcgen("render", "train", "-c", run_file).stdout
    old = workplace / "old.sh"
    for before, after in (
        ("export NCCL_DEBUG=WARN #", "export NCCL_DEBUG='a # b' #"),
        ("    export UCX_TLS=", "    export OLD_TLS="),
        ("#SBATCH --mem=0\n", "#SBATCH --mem=5G\n"),
        ("#SBATCH --exclusive\n", ""),
        ("max_restarts=100\n", "max_restarts=7\n"),
        ("    --kill-on-bad-exit=1\n", ""),
        ('"eval_iters": 10', '"eval_iters": 7'),
        ("prepare_node() { :; }", "prepare_node() { true; }"),
    ):
        assert before in now, before
        now = now.replace(before, after)
    old.write_text(now)
    found = differences(old)
    [change] = found["changed"]
    assert (change["name"], change["before"]["value"], change["after"]["value"]) == (
        "NCCL_DEBUG",
        "a # b",
        "WARN",
    )
    assert change["before"]["why"] == change["after"]["why"]
    assert re.fullmatch(rf"{old}:\d+", change["before"]["origin"])
    assert [variable["name"] for variable in found["added"]] == ["UCX_TLS"]
    assert [variable["name"] for variable in found["removed"]] == ["OLD_TLS"]
    assert found["directives"] == {
        "exclusive": {"removed": [], "added": [""]},
        "mem": {"removed": ["5G"], "added": ["0"]},
    }
    assert found["settings"]["max_restarts"] == {"removed": ["7"], "added": ["100"]}
    assert found["settings"]["step"] == {"removed": [], "added": ["--kill-on-bad-exit=1"]}
    assert found["files"]["trainer.json"]["added"] == ["training.eval_iters = 10"]
    assert found["functions"] == ["prepare_node"]
    text = hpcgen("explain", "--diff", old).stdout
    assert "# directives\n~ exclusive\n    + given\n~ mem\n    - 5G\n    + 0\n" in text
    assert "~ trainer.json\n    - training.eval_iters = 7\n    + training.eval_iters = 10\n" in text


def test_todays_script_has_no_differences(run_file: Path, workplace: Path) -> None:
    for stage in ("train", "node-health"):
        (workplace / "now.sh").write_text(hpcgen("render", stage, "-c", run_file).stdout)
        found = differences("now.sh")
        assert found["stage"] == stage
        for kind in ("added", "removed", "changed", "directives", "settings", "files", "functions"):
            assert not found[kind], kind


def test_the_script_that_a_job_queues_is_one_of_its_files(run_file: Path, workplace: Path) -> None:
    values = {**RUN, "checkpoint": {"save_interval": 500}, "evaluation": {"every": 1000, "tasks": ["piqa"]}}
    write_yaml(run_file, values | {"slurm": {**RUN["slurm"], "evaluate": {"time": "2:00:00"}}})
    now = hpcgen("render", "train", "-c", run_file).stdout
    assert now.count("#SBATCH --time=") == 2
    (workplace / "old.sh").write_text(now.replace("--time=02:00:00", "--time=01:00:00"))
    found = differences("old.sh")
    assert found["same"] == 33
    assert (found["directives"], found["functions"]) == ({}, [])
    assert found["files"]["queued script"]["added"] == ["#SBATCH --time=02:00:00"]


def test_a_run_directory_has_the_scripts_of_hpcgen_submit(run_file: Path, workplace: Path) -> None:
    scripts = workplace / "runs/submitit-me"
    scripts.mkdir(parents=True)
    for number, stage in enumerate(("node-health", "train", "node-health"), 7):
        script = scripts / f"{number}_submission.sh"
        script.write_text(hpcgen("render", stage, "-c", run_file).stdout + "srun() { :; }\n")
        os.utime(script, (number, number))
    found = hpcgen("explain", "--diff", "runs", "--stage", "train")
    assert found.stdout.startswith(
        "stage train: 33 variables, identical to runs/submitit-me/8_submission.sh, rend"
    )
    assert "9_submission.sh" in hpcgen("explain", "--diff", "runs").stdout
    found = hpcgen("explain", "--diff", "runs", "--stage", "run")
    assert found.status == 2
    assert (
        "runs has no submitit/*_submission.sh with a script of stage run; name a script in its"
        in found.stderr
    )


@pytest.mark.parametrize(
    ("other", "options", "message"),
    [
        (
            SCRIPT,
            ("--stage", "node-health"),
            "train-0.2.0.sbatch is a script of stage train; name a script of the",
        ),
        ("other.sh", (), "other.sh is not a script of hpcgen; name a script of hpcgen render or a run file"),
        ("0.1.0", (), "--diff 0.1.0: this version has no record; use 0.2.0"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    other: object, options: tuple[str, ...], message: str, run_file: Path, workplace: Path
) -> None:
    (workplace / "other.sh").write_text("#!/bin/bash\necho hello\n")
    found = hpcgen("explain", "--diff", other, *options)
    assert (found.status, found.stdout) == (2, "")
    assert message in found.stderr


@pytest.fixture
def edited_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Changes a text in the record of 0.2.0."""
    copy = tmp_path / "releases"
    shutil.copytree(RELEASES, copy)
    for module in ("hpcgen.resources", "hpcgen.run_plan.release"):
        monkeypatch.setattr(f"{module}.RELEASES", copy)

    def edit(file: str, before: str, after: str) -> None:
        path = copy / "0.2.0" / file
        assert before in path.read_text(), before
        path.write_text(path.read_text().replace(before, after))

    return edit


def test_a_release_is_compared_by_its_record(
    run_file: Path, workplace: Path, edited_release: Callable[[str, str, str], None]
) -> None:
    edited_release("topologies/ndv5.yaml", "value: WARN", "value: INFO")
    edited_release("topologies/ndv5.yaml", "NCCL_PXN_DISABLE:", "NCCL_PXN_OFF:")
    edited_release("clusters/azure-ndv5.yaml", "partition: hpc", "partition: hpc\n  qos: high")
    edited_release("record.json", '"training.eval_iters": 10', '"training.eval_iters": 7')
    edited_release("record.json", '"container.workdir": null', '"container.workdir": "/w"')
    edited_release("record.json", '"OMP_NUM_THREADS": [', '"OMP_THREADS": [')
    edited_release("record.json", '"append"', '"truncate"')
    found = differences("0.2.0")
    assert [(each["name"], each["before"]["value"]) for each in found["changed"]] == [("NCCL_DEBUG", "INFO")]
    assert [each["name"] for each in found["added"]] == ["NCCL_PXN_DISABLE", "OMP_NUM_THREADS"]
    assert [each["name"] for each in found["removed"]] == ["NCCL_PXN_OFF", "OMP_THREADS"]
    assert found["directives"] == {
        "comment": {"removed": [], "added": ["hpcgen"]},  # new since 0.2.0
        "open-mode": {"removed": ["truncate"], "added": ["append"]},
        "qos": {"removed": ["high"], "added": []},
    }
    assert found["defaults"]["run file: training.eval_iters"] == {"removed": ["7"], "added": ["10"]}
    assert found["defaults"]["run file: container.workdir"] == {"removed": ['"/w"'], "added": ["null"]}
    # a value that the site or the run sets does not change with an upgrade
    own = {"extends": "ndv5", "environment": {"NCCL_DEBUG": {"value": "ERROR", "why": "w", "source": "s"}}}
    write_yaml(workplace / "topologies/own.yaml", own)
    write_yaml(workplace / "clusters/own.yaml", {"extends": "azure-ndv5", "node_type": "own"})
    own_values = ("--set", "cluster=own", "--set", "training.eval_iters=9")
    found = differences("0.2.0", *own_values)
    assert not found["changed"]
    assert "run file: training.eval_iters" not in found["defaults"]
    found = hpcgen("explain", "--diff", "0.2.0")
    assert "~ run file: training.eval_iters\n    - 7\n    + 10\n" in found.stdout
    assert found.stderr.splitlines()[-1].startswith(
        "not compared: shell functions, templates, and how hpcgen 0.2.0"
    )


def test_a_run_on_what_a_release_did_not_ship_is_not_compared_with_it(workplace: Path) -> None:
    write_yaml(workplace / "clusters/new.yaml", {"extends": "local", "node_type": "h100-sxm"})
    found = hpcgen("explain", "--cluster", "new", "--diff", "0.2.0")
    assert (found.status, found.stdout) == (2, "")
    assert "not comparable with hpcgen 0.2.0, with whose files this run would be refused: " in found.stderr
    assert "clusters/new.yaml:3: node_type = h100-sxm is not a known node type" in found.stderr


def test_a_default_that_changed_since_0_2_0_is_found(workplace: Path) -> None:
    found = hpcgen("explain", "--cluster", "local", "--stage", "node-health", "--diff", "0.2.0", "--json")
    printed = json.loads(found.stdout)
    assert [printed[kind] for kind in ("added", "removed", "changed")] == [[], [], []]
    defaults = printed["defaults"]
    assert defaults["cluster profile: slurm_version"] == {"removed": ['"22.05"'], "added": ["null"]}


def test_every_release_from_0_2_0_on_has_a_record() -> None:
    """Before a release is tagged: make release-record."""
    released = re.findall(r"^## (\d+\.\d+\.\d+) ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert release_names() == sorted(set(released) - {"0.1.0"})


@pytest.mark.parametrize("version", release_names())
def test_the_files_of_a_release_can_still_be_read(version: str) -> None:
    with as_of(version):
        assert shipped("topologies").parent.name == version
        for name in node_type_names():
            assert load_node_type(name).description
        for name in cluster_names():
            assert load_cluster(name)[0].description


def test_a_record_of_this_version_has_no_differences(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(tmp_path / "9.9.9")
    for module in ("hpcgen.resources", "hpcgen.run_plan.release"):
        monkeypatch.setattr(f"{module}.RELEASES", tmp_path)
    assert read_release("9.9.9").variables["train"]
    found = differences("9.9.9")
    assert [found[kind] for kind in ("added", "removed", "changed", "directives", "defaults")] == [
        [],
        [],
        [],
        {},
        {},
    ]
