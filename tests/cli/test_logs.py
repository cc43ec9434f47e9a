"""hpcgen logs: the root failure on top, then the lines of the ranks."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from hpcgen.cli import logs_run as logs
from tests.cli.command import hpcgen
from tests.logs.logged_run import BEGAN, event, write_events, write_failed_run
from tests.patience import wait_until


def test_the_root_failure_is_on_top_and_the_cascade_folded_below(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run", "cuda-oom")
    found = hpcgen("logs", run, "-n", 2)
    assert found.status == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0] == "train job 7, restart 0 (attempt 1 of 1): failed with status 137"
    assert lines[2] == "root failure: a GPU ran out of memory"
    assert lines[3].strip().startswith("rank 3, node ndv5-2, ")
    assert lines[4].strip().startswith("torch.OutOfMemoryError: CUDA out of memory.")
    assert "  + 3 ranks: lost their peers" in lines
    assert "  see docs/faults.md#a-gpu-runs-out-of-memory" in lines
    assert lines[-1].endswith("this was restart 0 of at most 0: giving up")
    assert lines[-3] == "", "the number of lines"


def test_json_has_the_failure_and_the_lines(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run")
    found = json.loads(hpcgen("logs", run, "--json", "--rank", 1).stdout)
    assert (found["job"], found["attempt"], found["verdict"]) == ("7", 1, "failed")
    assert (found["failure"]["kind"], found["failure"]["rank"]) == ("killed", 2)
    assert found["lines"]
    assert {line["rank"] for line in found["lines"]} == {1}


def test_attempts_and_tasks_are_chosen(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run")
    write_events(run, event("start", BEGAN + 100, 1))
    with (run / "train-7.log").open("a") as log:
        log.write("2026-11-26T16:48:34+0000 hpcgen: tiny: train job 7, restart 1, on ndv5-[1-2]\nnew\n")
    assert "restart 1 (attempt 2 of 2): no end is recorded" in hpcgen("logs", run).stdout
    assert "process was killed" not in hpcgen("logs", run).stdout
    first = hpcgen("logs", run, "--attempt", 1).stdout
    assert "process was killed" in first
    assert "new" not in first.splitlines()
    found = hpcgen("logs", run, "--attempt", 3)
    assert found.status == 2
    assert "--attempt 3 does not exist; use 1 to 2" in found.stderr
    found = hpcgen("logs", run, "--task", 4)
    assert found.status == 2
    assert "stage train has no log of task 4" in found.stderr
    found = hpcgen("logs", run, "--stage", "prepare")
    assert found.status == 2
    assert "stage prepare has no log; the stages with logs are train" in found.stderr


def test_a_log_without_events_is_shown(tmp_path: Path) -> None:
    """As hpcgen 0.2.0 left it."""
    run = write_failed_run(tmp_path / "run")
    (run / "jobs" / "7" / "events.jsonl").unlink()
    found = hpcgen("logs", run)
    assert "root failure: a process was killed" in found.stdout
    assert "rank 2, node ndv5-2" in found.stdout


def test_a_run_without_a_log_says_so(tmp_path: Path) -> None:
    found = hpcgen("logs", tmp_path)
    assert found.status == 2
    assert "no job has written a log yet" in found.stderr
    found = hpcgen("logs", tmp_path / "absent")
    assert found.status == 2
    assert "there is no such run directory" in found.stderr


@pytest.mark.process
def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run")
    events = run / "jobs" / "8" / "events.jsonl"
    events.parent.mkdir()
    events.symlink_to(events)
    (run / "train-8.log").symlink_to("train-8.log")
    for command in ("logs", "doctor"):
        told = hpcgen(command, run).stderr
        assert f"{events} cannot be read" in told
        assert f"{run / 'train-8.log'} cannot be read" in told


@pytest.mark.process
def test_jobs_that_cannot_be_read_leave_the_logs(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run")
    (run / "jobs").rename(tmp_path / "elsewhere")
    (run / "jobs").symlink_to("jobs")
    found = hpcgen("logs", run)
    assert "root failure: a process was killed" in found.stdout
    assert f"{run / 'jobs'} cannot be read" in found.stderr
    assert f"{run / 'jobs'} cannot be read" in hpcgen("doctor", run).stderr


def test_a_rank_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run")
    refused = hpcgen("logs", run, "--rank", "77")
    assert refused.status == 2
    assert "--rank 77 does not exist; use 0 to 3" in refused.stderr


def test_control_characters_and_secrets_do_not_reach_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_failed_run(tmp_path / "run")
    token = "hf_" + "a1B2" * 9
    monkeypatch.setenv("SITE_TOKEN", "rosebud-7")
    with (run / "train-7.log").open("a") as log:
        log.write(f"\x1b]0;title\x07 {token} rosebud-7\n")
    for shown in (hpcgen("logs", run).stdout, hpcgen("logs", run, "--json").stdout):
        assert token not in shown
        assert "rosebud" not in shown
        assert "[redacted]" in shown
    assert "\x1b" not in hpcgen("logs", run).stdout


@pytest.mark.parametrize(
    ("options", "ended"),
    [
        ((), {"verdict": "done", "status": "0", "reason": "done: 60 iterations"}),
        (("--json",), {"verdict": "done", "status": "0", "reason": "done: 60 iterations"}),
        ((), {"verdict": "terminated", "status": "143", "reason": "ended by Slurm", "cause": "canceled"}),
    ],
)
def test_follow_shows_new_lines_until_the_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], ended: dict[str, str]
) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0.01)
    run = write_failed_run(tmp_path / "run")
    write_events(run, event("start", BEGAN + 100, 1))
    reads = threading.Event()
    attempts = logs._attempts

    def noted(*arguments: object) -> object:
        reads.set()
        return attempts(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(logs, "_attempts", noted)

    def job() -> None:
        wait_until(reads.is_set)
        with (run / "train-7.log").open("a") as log:
            log.write("0: the last step\n")
        write_events(run, event("end", BEGAN + 200, 1, **ended))

    writer = threading.Thread(target=job)
    writer.start()
    found = hpcgen("logs", run, "--follow", "-n", 1, *options)
    writer.join()
    assert found.status == 0, found.stderr
    assert "the last step" in found.stdout
    assert ended["reason"] in found.stdout
    if options:
        assert [json.loads(line) for line in found.stdout.splitlines()][-1]["verdict"] == "done"
