"""Conditions that a rendered script refuses at its start: a shell outside a job, and planted symbolic links."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpcgen import load_run, plan, render
from hpcgen.stages import STAGES
from tests.rendering.golden import rendered
from tests.runs import minimal_run, write_yaml
from tests.standins import batch

pytestmark = pytest.mark.process

PLAIN_SHELL = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}


@pytest.mark.parametrize("stage", STAGES)
def test_outside_slurm_a_script_names_sbatch_in_one_line(stage: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(rendered("local-none", stage))
    for shell in ("bash", "sh"):
        done = subprocess.run(
            [shell, script], cwd=tmp_path, env=PLAIN_SHELL, capture_output=True, text=True, check=False
        )
        message = "this is a Slurm batch script: submit it with sbatch FILE\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
    assert list(tmp_path.iterdir()) == [script]


@pytest.fixture
def shared_script(tmp_path: Path) -> str:
    """Training in a directory that a group shares. It ends early: its secret is missing."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/jobs").mkdir()
    values = minimal_run(paths={"run_dir": "run"}, share="group", secrets=["NOT_EXPORTED"])
    return render(plan(load_run(write_yaml(tmp_path / "run.yaml", values)), ["train"]), "train")


def test_a_planted_link_is_not_followed(shared_script: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("RUNNING.77", "RUNNING"):
        (tmp_path / "run" / name).symlink_to(victim)
    done = batch(shared_script, tmp_path)
    assert "NOT_EXPORTED is not set" in done.log
    assert victim.read_text() == "precious"
    assert (tmp_path / "run/RUNNING").read_text() == "77\n"
    assert not (tmp_path / "run/RUNNING").is_symlink()


def test_a_planted_job_directory_is_refused(shared_script: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "run/jobs/77").symlink_to(elsewhere)
    done = batch(shared_script, tmp_path)
    assert done.status == 1
    assert f"{tmp_path}/run/jobs/77 was not made by this job" in done.log
    assert list(elsewhere.iterdir()) == []


def test_the_group_cannot_write_to_the_jobs_own_directory(shared_script: str, tmp_path: Path) -> None:
    batch(shared_script, tmp_path)
    job = tmp_path / "run/jobs/77"
    assert job.stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in job.iterdir()} == {0o640}
    assert (tmp_path / "run").stat().st_mode & 0o7777 == 0o2770
