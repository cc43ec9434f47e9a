"""The status of a run, from its directory and Slurm's answer. tests/slurm/test_status.py asks a real Slurm."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcgen.errors import HpcgenError
from hpcgen.runs.files import RunReader
from hpcgen.runs.slurm import NO_ACCOUNTS, AccountedJob, Accounts, Queue, QueuedJob
from hpcgen.runs.status import RunStatus, status_of, unsettled_jobs
from tests.recorded_run import START, STEP_S, start, steps, write_checkpoint, write_run
from trainer.contract.files.shared_files import user
from trainer.contract.record import replaced

NOW = START + STEP_S * 300 + 20
"""20 s after the last step of `training_run`."""
Events = Sequence[tuple[str, dict[str, str]]]


def write_events(
    run: Path,
    job: str,
    events: Events,
    *,
    stage: str = "train",
    restart: int = 0,
    values: Mapping[str, str] | None = None,
) -> None:
    """Adds events of a job, 10 s apart. The first is its start, with `values`."""
    first = ("start", {"nodes": "n[1-2]", "host": "n1", **(values or {})})
    path = run / "jobs" / job / "events.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for number, (event, more) in enumerate((first, *events)):
            time = START - 5 + 10_000 * restart + 10 * number
            line = {"event": event, "time": time, "job": job, "restart": restart, "stage": stage, **more}
            file.write(json.dumps(line) + "\n")


def end(verdict: str, reason: str = "") -> tuple[str, dict[str, str]]:
    return "end", {"verdict": verdict, "status": "0", "reason": reason}


def queued(job: str = "7", **values: Any) -> QueuedJob:
    usual: dict[str, Any] = {
        **{"job": job, "state": "RUNNING", "reason": "", "nodes": "n[1-2]", "dependency": "", "user": "ann"},
        **{"name": "gpt", "log": ""},
        **dict.fromkeys(("submitted", "starts", "ends")),
    }
    return QueuedJob(**usual | values)


def answer(*jobs: QueuedJob, problem: str = "") -> Queue:
    return Queue(jobs=jobs, problem=problem, asked=NOW)


SILENCE = answer(problem="squeue does not answer within 15 s")
WAITS = {"state": "PENDING", "reason": "Resources"}


def status(run: Path, queue: Queue, accounts: Accounts = NO_ACCOUNTS, now: float = NOW) -> RunStatus:
    return status_of(RunReader(run).read(now), queue, accounts, now)


@pytest.fixture
def training_run(tmp_path: Path) -> Path:
    """A run with 300 of 1,000 steps, whose job has not recorded its end."""
    run = write_run(tmp_path / "gpt", [start(), *steps(1, 300)])
    write_events(run, "7", [("launch", {"nodes": "n1 n2"})])
    return run


def test_a_running_job_makes_a_running_run(training_run: Path) -> None:
    ends = NOW + 600
    found = status(training_run, answer(queued(log=f"{training_run}/train-7.log", ends=ends)))
    assert (found.state, found.why, found.name) == ("running", "", "gpt")
    training = found.training
    assert training is not None
    assert (training.iteration, training.train_iters, training.tokens_per_s) == (300, 1000, 262144.0)
    assert training.pace_s == pytest.approx(STEP_S)
    assert training.ends == pytest.approx(START + STEP_S * 1000)
    assert training.time_limit == ends
    assert [(job.job, job.stage, job.words) for job in found.jobs] == [("7", "train", "runs")]
    assert [attempt.state for attempt in found.attempts] == ["running"]


@pytest.mark.parametrize(
    ("queue", "accounts", "now", "expected"),
    [
        (answer(queued(**WAITS)), NO_ACCOUNTS, NOW, ("killed", "Slurm requeued it")),
        (
            answer(queued(state="NODE_FAIL")),
            NO_ACCOUNTS,
            NOW,
            ("killed", "a node failed, according to Slurm"),
        ),
        (answer(), NO_ACCOUNTS, NOW, ("running", "")),  # of another cluster, or hidden: it is active
        (SILENCE, NO_ACCOUNTS, NOW + 5000, ("unknown", "")),
        (
            answer(),
            NO_ACCOUNTS,
            NOW + 5000,
            ("killed", "it ended without a verdict: it was killed, or its first node was lost"),
        ),
    ],
)
def test_an_attempt_without_an_end(
    training_run: Path, queue: Queue, accounts: Accounts, now: float, expected: tuple[str, str]
) -> None:
    attempt = status(training_run, queue, accounts, now).attempts[-1]
    assert (attempt.state, attempt.reason) == expected


def test_accounting_knows_why_a_purged_job_ended(training_run: Path) -> None:
    run = RunReader(training_run).read(NOW + 5000)
    assert unsettled_jobs([run], answer()) == ("7",)
    assert unsettled_jobs([run], answer(queued())) == ()
    assert unsettled_jobs([run], SILENCE) == ()
    times = dict.fromkeys(("submitted", "eligible", "started", "ended"))
    job = AccountedJob(job="7", state="OUT_OF_MEMORY", status=0, nodes="n1", **times)
    found = status_of(run, answer(), Accounts(jobs={"7": job}), NOW + 5000)
    assert found.state == "died"
    assert found.why == "killed, because it used more memory than Slurm allows, according to Slurm"


@pytest.mark.parametrize(
    ("verdict", "queue", "state"),
    [
        ("done", answer(), "done"),
        ("failed", answer(), "failed"),
        ("failed", answer(queued("8", **WAITS)), "waiting"),
        ("terminated", answer(), "stopped"),
        ("stopped", answer(), "stopped"),
        ("requeued", answer(queued(**WAITS)), "waiting"),
        ("requeued", answer(), "stopped"),
        ("requeued", SILENCE, "waiting"),
        ("failed", SILENCE, "failed"),
    ],
)
def test_the_verdict_of_the_last_attempt_decides(
    training_run: Path, verdict: str, queue: Queue, state: str
) -> None:
    write_events(training_run, "8", [end(verdict, "because")], restart=1)
    jobs = tuple(QueuedJob(**{**vars(job), "log": f"{training_run}/train-%j.log"}) for job in queue.jobs)
    found = status(training_run, Queue(jobs=jobs, problem=queue.problem, asked=NOW), now=NOW + 20_000)
    assert found.state == state
    assert found.attempts[-1].reason == "because"


@pytest.mark.parametrize(("marker", "text"), [("DONE", "1000\nabc\n"), ("FAILED", "a mistake")])
def test_markers_decide_if_no_job_runs(training_run: Path, marker: str, text: str) -> None:
    (training_run / marker).write_text(text)
    found = status(training_run, answer())
    assert (found.state, found.why) == (marker.lower(), "" if marker == "DONE" else "a mistake")


def test_what_happens_during_an_attempt_is_told(training_run: Path) -> None:
    again = ("restart_in_job", {"status": "1", "progress": "5"})
    write_events(training_run, "8", [again, again, ("stop", {"asks": "stop"})], restart=1)
    found = status(training_run, answer(queued("8")), now=START + 10_020)
    assert (found.attempts[-1].restarts_in_job, found.attempts[-1].asked_to_stop) == (2, True)
    with (training_run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "start", "iteration": 300, "time": START + 10_010}) + "\n")
    found = status(training_run, answer(queued("8")), now=START + 10_020)
    assert (found.state, found.why) == ("running", "asked to save a checkpoint and stop")


def test_a_run_that_starts_or_ends_has_no_expected_end(training_run: Path) -> None:
    """The pace is that of the attempt before, or of steps that do not follow."""

    def ends(job: QueuedJob, now: float = NOW) -> tuple[bool, bool]:
        """Returns whether the status has an expected end and a time limit."""
        training = status(training_run, answer(job), now=now).training
        assert training is not None
        return training.ends is not None, training.time_limit is not None

    running = {"log": str(training_run / "train-%j.log"), "ends": NOW + 1}
    assert ends(queued(**running)) == (True, True)
    assert ends(queued(**running, state="COMPLETING")) == (True, False)
    write_events(training_run, "8", [], restart=1)
    assert ends(queued("8", **running), now=START + 10_000) == (False, False)
    (training_run / "jobs" / "8" / "events.jsonl").unlink()
    write_events(training_run, "7", [("stop", {"asks": "stop"})])
    assert ends(queued(**running)) == (False, False)


def test_a_job_that_was_killed_in_a_hang_hung(training_run: Path) -> None:
    (training_run / "stacks").mkdir()
    (training_run / "stacks" / "rank-00003.txt").write_text("{}")
    found = status(training_run, answer(), now=NOW + 3000)
    assert (found.state, found.attempts[0].state) == ("hung", "killed")


def test_a_hang_is_told_while_the_job_runs(training_run: Path) -> None:
    stacks = training_run / "stacks"
    stacks.mkdir()
    (stacks / "rank-00003.txt").write_text("{}")
    found = status(training_run, answer(queued()), now=NOW + 3000)
    assert found.state == "hung"


def test_a_job_that_starts_is_not_silent(training_run: Path) -> None:
    write_events(training_run, "8", [], restart=1)
    later = START + 10_000
    found = status(training_run, answer(queued("8")), now=later)
    assert (found.state, found.why) == ("running", "starting")
    assert status(training_run, answer(queued("8")), now=later + 5000).state == "silent"


def test_a_job_that_began_after_slurm_answered_runs(training_run: Path) -> None:
    write_events(training_run, "8", [], restart=1)
    queue = Queue(jobs=(queued("8", **WAITS),), asked=START)
    assert status(training_run, queue, now=START + 10_010).attempts[-1].state == "running"


def test_nodes_checkpoints_and_spares_are_told(training_run: Path) -> None:
    write_checkpoint(training_run / "checkpoints", 200)
    (training_run / "checkpoints" / "iter_0000300").mkdir()
    (training_run / "checkpoints" / "iter_0000300" / "STARTED").touch()
    (training_run / "excluded_nodes").write_text(f"n7 {NOW + 60:.0f}\nn8 {NOW - 60:.0f}\nn9\n")
    write_events(training_run, "8", [("spare", {"lost": "n2", "nodes": "n1 n3"}), end("done")], restart=1)
    found = status(training_run, answer())
    assert found.checkpoints is not None
    assert (found.checkpoints.newest, found.checkpoints.saving, found.checkpoints.complete) == (200, 300, 1)
    assert list(found.excluded) == ["n7"]
    assert found.attempts[-1].spares == ("n2",)
    assert found.disk is not None
    assert found.disk.free > 0


def test_the_tasks_of_an_array_are_counted(tmp_path: Path) -> None:
    for task in range(4):
        write_events(tmp_path, f"9_{task}", [end("done")], stage="prepare")
    write_events(tmp_path, "9_4", [end("failed", "no space left")], stage="prepare")
    for task in (5, 6):
        write_events(tmp_path, f"9_{task}", [], stage="prepare")
    waiting = queued("9_[7-99%2]", **WAITS, log=f"{tmp_path}/prepare-%A_%a.log")
    found = status(tmp_path, answer(queued("9_5", log=f"{tmp_path}/prepare-9_5.log"), waiting))
    array = found.arrays[0]
    counts = (array.done, array.running, array.waiting, array.failed, array.killed, array.unknown)
    assert counts == (4, 1, 93, 1, 1, 0)
    assert found.state == "running"
    assert status(tmp_path, answer()).state == "failed"
    assert status(tmp_path, answer()).why == "no space left"
    assert status(tmp_path, SILENCE).arrays[0].unknown == 2


def test_a_job_of_this_machine_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "jobs" / "local-1" / "events.jsonl"
    path.parent.mkdir(parents=True)
    begin = {"event": "start", "time": START, "job": "local-1", "restart": 0, "stage": "export"}
    path.write_text(json.dumps({**begin, "host": socket.gethostname(), "pid": str(os.getpid())}))
    assert status(tmp_path, answer()).state == "running"
    path.write_text(json.dumps({**begin, "host": socket.gethostname(), "pid": "99999999"}))
    assert status(tmp_path, answer()).state == "died"


def test_a_directory_in_which_nothing_ran(tmp_path: Path) -> None:
    assert status(tmp_path, answer()).state == "new"
    with pytest.raises(HpcgenError, match="no such directory"):
        RunReader(tmp_path / "none").read(NOW)
    (tmp_path / "file").touch()
    with pytest.raises(HpcgenError, match="is a file"):
        RunReader(tmp_path / "file").read(NOW)


def test_secrets_in_reasons_are_removed(training_run: Path) -> None:
    secret = "hf_" + "a" * 34
    write_events(training_run, "8", [end("failed", f"token {secret} refused")], restart=1)
    (training_run / "FAILED").write_text(f"HF_TOKEN={secret}")
    found = status(training_run, answer())
    assert secret not in repr(found)


def test_strange_files_are_no_exception(training_run: Path) -> None:
    """In a shared run, others can write anything."""
    (training_run / "excluded_nodes").write_bytes(b"\xff 12\n\n\x00")
    (training_run / "trained-with.json").write_text(
        '{"model": {}, "training": {"train_iters": "x"}, "checkpoint": []}'
    )
    (training_run / "heartbeat").write_text("[]")
    os.mkfifo(training_run / "DONE")
    job = training_run / "jobs" / "7"
    (job / "events.jsonl").write_text(
        '{"event": "start", "time": 1, "job": "7", "restart": 0, "stage": "x\\u001b["}\n'
    )
    (training_run / "jobs" / "8_1").write_text("a file")
    (training_run / "jobs" / "8_2").mkdir()
    os.mkfifo(training_run / "jobs" / "8_2" / "events.jsonl")
    assert status(training_run, answer()).attempts[0].stage == "x\x1b["


@pytest.mark.parametrize("damage", ["loop", "binary", "fifo", "directory"])
def test_events_that_cannot_be_read_are_named(training_run: Path, damage: str) -> None:
    """The other attempts are shown, and nobody takes the last of them for the newest without a word."""
    write_events(training_run, "8", [end("done")], restart=1)
    events = training_run / "jobs" / "8" / "events.jsonl"
    events.unlink()
    {
        "loop": lambda: events.symlink_to(events),
        "binary": lambda: events.write_bytes(b"\x80\0\n"),
        "fifo": lambda: os.mkfifo(events),
        "directory": events.mkdir,
    }[damage]()
    found = status(training_run, answer())
    assert [attempt.job for attempt in found.attempts] == ["7"]
    assert [problem.startswith(str(events)) for problem in found.problems] == [True]


def test_lost_metrics_are_named(training_run: Path) -> None:
    assert status(training_run, answer()).problems == ()
    write_checkpoint(training_run / "checkpoints", 200)
    (training_run / "metrics.jsonl").unlink()
    [problem] = status(training_run, answer()).problems
    assert problem.startswith(f"{training_run / 'metrics.jsonl'} is missing")


def test_files_are_read_once_for_many_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that ended is not read again, and no task is opened more than twice."""
    opened: list[str] = []
    real = os.open

    def counting(path: Any, *arguments: Any, **options: Any) -> int:
        opened.append(os.fspath(path))
        return real(path, *arguments, **options)

    for task in range(300):
        write_events(tmp_path, f"9_{task}", [end("done")] if task < 290 else [], stage="prepare")
    monkeypatch.setattr(os, "open", counting)
    reader = RunReader(tmp_path)
    reader.read(NOW)
    assert sum(path.endswith("events.jsonl") for path in opened) <= 301
    opened.clear()
    reader.read(NOW)
    assert sum(path.endswith("events.jsonl") for path in opened) <= 11


def test_a_job_of_another_cluster_has_the_same_number(training_run: Path) -> None:
    """Attempt 0 of a job 7 of another cluster began in the same directory, after the one without an end."""
    later = START + 5000
    with (training_run / "jobs" / "7" / "events.jsonl").open("a") as file:
        for time, event in ((later, "start"), (later + 10, "end")):
            line = {
                "event": event,
                "time": time,
                "job": "7",
                "restart": 0,
                "stage": "train",
                "verdict": "done",
            }
            file.write(json.dumps(line) + "\n")
    found = status(training_run, answer(), now=later + 20)
    assert [(attempt.began, attempt.state) for attempt in found.attempts] == [
        (START - 5, "killed"),
        (later, "done"),
    ]


def test_a_job_of_another_run_is_not_taken_for_this_one(training_run: Path) -> None:
    elsewhere = queued(log="/elsewhere/gpt/train-7.log")
    assert status(training_run, answer(elsewhere), now=NOW + 5000).state == "died"


def test_jobs_of_a_colleague_may_be_hidden(training_run: Path) -> None:
    """With PrivateData=jobs, squeue shows none of them."""
    run = replaced(RunReader(training_run).read(NOW + 5000), is_own=False)
    assert status_of(run, answer(), NO_ACCOUNTS, NOW + 5000).state == "silent"
    shown = answer(queued("5", user=user(run.owner)))
    assert status_of(run, shown, NO_ACCOUNTS, NOW + 5000).state == "died"


def test_an_attempt_that_a_later_job_followed_does_not_run(training_run: Path) -> None:
    """The metrics are fresh, but from the later job."""
    write_events(training_run, "8", [end("terminated", "canceled")], restart=1)
    assert [attempt.state for attempt in status(training_run, answer()).attempts] == ["killed", "terminated"]
