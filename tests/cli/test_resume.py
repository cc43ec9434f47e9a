"""What hpcgen stop, cancel and resume refuse before they touch a job. tests/slurm/test_control.py does the rest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from hpcgen.errors import HpcgenError
from hpcgen.runs import control
from hpcgen.slurm.events import recorded
from tests.cli.command import hpcgen
from tests.operate.test_status import NOW, end, write_events
from tests.runs import minimal_run, write_yaml

pytestmark = pytest.mark.process  # squeue


def ended_run(directory: Path, job: str = "local-a", ended: str = "stopped") -> Path:
    """A run file, and a run directory with a job that was submitted with it."""
    file = write_yaml(directory / "run.yaml", minimal_run(paths={"run_dir": "one"}))
    write_events(directory / "one", job, [end(ended)])
    submission = {
        "stage": "train",
        "run_file": str(file),
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        **{"overrides": [], "withheld": [], "templates": []},
    }
    (directory / "one/jobs" / job / "submission.json").write_text(json.dumps(submission))
    return file


def test_a_run_file_that_now_names_another_directory_is_not_resumed(workplace: Path) -> None:
    file = ended_run(workplace)
    resumed = ("resume", "one", "--dry-run")
    assert hpcgen(*resumed).status == 0
    file.write_text(file.read_text().replace("one", "two"))
    refused = hpcgen(*resumed)
    assert (refused.status, refused.stdout) == (2, "")
    assert f"paths.run_dir is {workplace}/two, but the run to resume is in {workplace}/one" in refused.stderr
    assert f"--set paths.run_dir={workplace}/one" in refused.stderr
    again = hpcgen(*resumed, "--set", f"paths.run_dir={workplace}/one")
    assert again.status == 0, again


@pytest.mark.parametrize("command", ["stop", "cancel", "resume"])
def test_a_run_without_events_is_unknown_while_slurm_does_not_answer(
    command: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of hpcgen 0.2.0 that runs."""
    (workplace / "one").mkdir()
    (workplace / "one/RUNNING").write_text("7\n")
    monkeypatch.setenv("PATH", str(workplace))
    refused = hpcgen(command, "one")
    assert (refused.status, refused.stdout) == (2, "")
    assert "the jobs of the run are unknown: squeue is not installed here" in refused.stderr


def test_a_program_that_cannot_save_is_not_disturbed(tmp_path: Path) -> None:
    write_events(tmp_path, "7", [], stage="run", values={"asks": ""})
    with pytest.raises(HpcgenError, match="job 7 goes on: its program cannot be asked to save"):
        control.ask_to_stop(tmp_path, "7")
    assert [path.name for path in (tmp_path / "jobs/7").iterdir()] == ["events.jsonl"]


def test_only_a_job_on_this_machine_that_can_save_is_stopped(tmp_path: Path) -> None:
    job = tmp_path / "jobs/local-1"
    job.mkdir(parents=True)
    with recorded(job, "local-1", "prepare"):
        left = hpcgen("stop", tmp_path)
        assert left.status == 0
        assert "other jobs go on: local-1 (prepare)" in left.stderr
    with recorded(job, "local-1", "run", asks=""):
        refused = hpcgen("stop", tmp_path)
        assert refused.status == 2
        assert "job local-1 goes on: its program cannot be asked to save" in refused.stderr
    assert [path.name for path in job.iterdir()] == ["events.jsonl"]


def test_a_job_of_another_cluster_with_the_same_number_is_not_followed(tmp_path: Path) -> None:
    write_events(tmp_path, "7", [end("requeued")], restart=3, values={"cluster": "old"})
    events = tmp_path / "jobs/7/events.jsonl"
    later = {
        "event": "start",
        "time": NOW + 1e6,
        "job": "7",
        "restart": 0,
        "stage": "train",
        "cluster": "new",
    }
    events.write_text(f"{events.read_text()}{json.dumps(later)}\n")
    last = control.last_attempt(tmp_path, "7")
    assert last is not None
    assert last.cluster == "new"


def test_a_stage_of_a_newer_hpcgen_is_passed_over(workplace: Path) -> None:
    ended_run(workplace)
    write_events(workplace / "one", "local-b", (end("done"),), stage="future")
    assert hpcgen("resume", "one", "--dry-run").status == 0
