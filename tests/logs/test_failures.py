"""The root failure of an attempt, from the files of its run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpcgen.runs.attempts import JobAttempt, read_attempts
from hpcgen.runs.failures import root_failure
from hpcgen.runs.log_files import log_files
from tests.logs.cases import DIRECTORY, read
from tests.logs.logged_run import BEGAN, event, write_events, write_failed_run

STEP = "0: iteration {}/100: loss 2.5, grad norm 1.0, lr 1e-3, 0.4 s, 1,228 tokens/s\n"
BEGIN = "2026-11-26T15:48:34+0000 hpcgen: tiny: train job 7, restart {}, on ndv5-[1-2]\n"
ERROR = (
    "{rank}: Traceback (most recent call last):\n"
    '{rank}:   File "/code/model.py", line 3, in forward\n'
    "{rank}: {error}\n"
)


def last(run: Path) -> JobAttempt:
    return read_attempts(run)[-1]


def test_a_failed_attempt_names_rank_node_line_and_consequences(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run", "divide-one")
    failure = root_failure(run, last(run))
    assert failure is not None
    assert (failure.kind, failure.rank, failure.node) == ("exception", 3, "ndv5-2")
    assert "ZeroDivisionError" in failure.message
    assert failure.traceback.startswith("Traceback (most recent call last):")
    name, number = failure.place.split(":")
    assert (
        (run / name).read_text().splitlines()[int(number) - 1].endswith("Traceback (most recent call last):")
    )
    assert [str(each) for each in failure.cascade] == ["3 ranks: lost their peers"]


def test_each_attempt_of_a_requeued_job_has_its_own_failure(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    errors = ("ValueError: first", "KeyError: 'second'", "OSError: [Errno 28] No space left on device")
    for restart, error in enumerate(errors):
        with (run / "train-7.log").open("a") as log:
            log.write(BEGIN.format(restart) + STEP.format(1) + ERROR.format(rank=restart, error=error))
        write_events(
            run,
            event("start", BEGAN + 100 * restart, restart),
            event(
                "end", BEGAN + 100 * restart + 50, restart, verdict="requeued", status="1", reason="failed"
            ),
        )
    found = [root_failure(run, attempt) for attempt in read_attempts(run)]
    assert [(each.rank, each.message) for each in found if each] == list(enumerate(errors))


STAMP = "2026-11-26T15:50:00+0000 hpcgen: "
KILLED = "srun: error: ndv5-2: task 1: Killed\n"
AGAIN = (
    STAMP
    + "the step ended with status 137 after progress to 3: starting it again in this job (restart 1 of at most 9)\n"
)
CANCELED = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-26T16:43:32 ***\n"


@pytest.mark.parametrize(
    ("then", "kind"),
    [
        ("", None),
        (STAMP + "rendezvous at n1:10000, world size 2\n", None),
        (STAMP + "rendezvous at n1:10000, world size 2\n" + STEP.format(4) + CANCELED, "canceled"),
        (
            STAMP + "rendezvous at n1:10000, world size 2\n" + ERROR.format(rank=0, error="ValueError: x"),
            "exception",
        ),
    ],
)
def test_what_an_attempt_survived_is_not_why_it_ended(tmp_path: Path, then: str, kind: str | None) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "train-7.log").write_text(BEGIN.format(0) + STEP.format(3) + KILLED + AGAIN + then)
    write_events(run, event("start", BEGAN), event("restart_in_job", BEGAN + 40, status="137", progress="3"))
    failure = root_failure(run, last(run))
    assert (None if failure is None else failure.kind) == kind


def test_a_requeue_by_the_script_is_not_the_cause(tmp_path: Path) -> None:
    """Slurm writes that it canceled the job after the script has asked for a requeue."""
    run = tmp_path / "run"
    run.mkdir()
    hung = "1: trainer: hung: no progress for 10.2 s. Look first at rank 0, which did not report.\n"
    canceled = (
        "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-26T16:43:32 DUE TO JOB REQUEUE ***\n"
    )
    (run / "train-7.log").write_text(BEGIN.format(0) + STEP.format(1) + hung + canceled)
    end = event("end", BEGAN + 50, verdict="requeued", status="137", reason="failed with status 137")
    write_events(run, event("start", BEGAN), end)
    failure = root_failure(run, last(run))
    assert failure is not None
    assert (failure.kind, failure.rank) == ("hang", 0)


def test_an_attempt_that_saved_and_was_requeued_has_not_failed(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run")
    write_events(
        run,
        event(
            "end", BEGAN + 90, verdict="requeued", status="0", planned="yes", reason="stopped at iteration 5"
        ),
    )
    assert root_failure(run, last(run)) is None


def test_a_failure_before_megabytes_of_consequences_is_found(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run")
    lost = ERROR.format(
        rank="{}", error="torch.distributed.DistBackendError: NCCL error: remote process exited"
    )
    log = "".join(STEP.format(number) for number in range(9_000))
    log += ERROR.format(rank=5, error="ValueError: bad") + "".join(
        lost.replace("{}", str(rank)) for rank in range(2000)
    )
    (run / "train-7.log").write_text(log)
    failure = root_failure(run, last(run))
    assert failure is not None
    assert (failure.rank, failure.message, failure.place) == (5, "ValueError: bad", "train-7.log:9001")


def test_times_decide_between_the_logs_of_tasks(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run")
    (run / "train-7.log").write_text(BEGIN.format(0))
    (run / "submitit").mkdir()
    for rank, (time, error) in enumerate([("15:50:09", "late"), ("15:50:07", "early")]):
        traceback = f"Traceback (most recent call last):\n  File 'x.py', line 3, in f\nValueError: {error}\n"
        (run / "submitit" / f"7_{rank}_log.out").write_text(f"2026-11-26T{time}+0000 failed:\n{traceback}")
    assert [file.rank for file in log_files(run, last(run))] == [None, 0, 1]
    failure = root_failure(run, last(run))
    assert failure is not None
    assert (failure.rank, failure.message) == (1, "ValueError: early")
    assert failure.place == "submitit/7_1_log.out:2"


def test_the_text_of_failed_is_the_verdict(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run", "nan")
    (run / "train-7.log").write_text(BEGIN.format(0))
    (run / "FAILED").write_text(read(DIRECTORY / "nan.txt").failed)
    failure = root_failure(run, last(run))
    assert failure is not None
    assert (failure.kind, failure.rank, failure.place) == ("not-finite", 2, "FAILED:1")


def test_secrets_in_the_log_are_not_passed_on(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run")
    token = "hf_" + "a1B2" * 9
    (run / "train-7.log").write_text(ERROR.format(rank=0, error=f"ValueError: {token} is refused"))
    failure = root_failure(run, last(run))
    assert failure is not None
    assert token not in repr(failure)
    assert "[redacted]" in failure.message


def test_a_run_without_a_log_has_no_known_failure(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run")
    (run / "train-7.log").unlink()
    write_events(run, event("start", BEGAN + 100), event("end", BEGAN + 160, verdict="failed", status="1"))
    assert root_failure(run, last(run)) is None
    (run / "train-7.log").mkdir()
    assert root_failure(run, last(run)) is None


@pytest.mark.parametrize(
    ("status", "kind", "signal"),
    [
        ("7", "crash", "SIGBUS"),
        ("135", "crash", "SIGBUS"),
        ("139", "crash", "SIGSEGV"),
        ("137", "killed", "SIGKILL"),
        ("4", "", ""),
        ("143", "", ""),
    ],
)
@pytest.mark.parametrize("verdict", ["failed", "requeued"])
def test_a_status_without_words_names_the_signal(
    tmp_path: Path, status: str, kind: str, signal: str, verdict: str
) -> None:
    """4 and 143 are exit statuses of the trainer."""
    run = tmp_path / "run"
    run.mkdir()
    write_events(run, event("start"), event("end", BEGAN + 60, verdict=verdict, status=status))
    failure = root_failure(run, last(run))
    assert (failure.kind if failure else "") == kind
    assert signal in (failure.message if failure else "")


def test_a_task_with_the_status_of_a_crash_crashed(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run")
    (run / "train-7.log").write_text(
        BEGIN.format(0) + "srun: error: ndv5-2: task 1: Exited with exit code 135\n"
    )
    failure = root_failure(run, last(run))
    assert failure is not None
    assert (failure.kind, failure.rank, failure.node) == ("crash", 1, "ndv5-2")


def test_a_hang_without_a_log_is_told_from_the_stacks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "stacks").mkdir(parents=True)
    write_events(run, event("start"), event("launch", nodes="n1 n2", ranks="2"))
    report = {"rank": 0, "host": "n1", "pid": 1, "iteration": 5, "phase": "step", "at": "step.py:1 _agree"}
    (run / "stacks" / "rank-00000.txt").write_text(json.dumps({**report, "quiet_s": 60, "since": "10:00"}))
    failure = root_failure(run, last(run))
    assert failure is not None
    assert (failure.kind, failure.rank, failure.node) == ("hang", 1, "n2")
    os.utime(run / "stacks" / "rank-00000.txt", (BEGAN - 9, BEGAN - 9))
    assert root_failure(run, last(run)) is None  # of an earlier attempt


def test_a_log_of_other_bytes_is_read(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run")
    (run / "train-7.log").write_bytes(bytes(range(256)) * 99 + b"\n1: Traceback (most recent call last):")
    assert root_failure(run, last(run)) is not None


def test_a_hang_shows_the_stack_of_the_rank_to_look_at(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run", "sleep")
    (run / "stacks").mkdir()
    for rank, place in enumerate(["all_reduce", "read_storage"]):
        frame = f'  File "/code/trainer/loop.py", line 3, in {place}'
        text = f"{{}}\n\nMain thread (most recent call last):\n{frame}\n\nAll threads:\nThread 0x1"
        (run / "stacks" / f"rank-{rank:05d}.txt").write_text(text)
    failure = root_failure(run, last(run))
    assert failure is not None
    assert (failure.kind, failure.rank, failure.node) == ("hang", 1, "ndv5-1")
    assert failure.traceback.startswith("rank-00001.txt:\n")
    assert failure.traceback.endswith("in read_storage")


def test_the_log_of_a_job_on_this_machine_is_named_in_its_events(tmp_path: Path) -> None:
    run = write_failed_run(tmp_path / "run")
    (run / "submitit").mkdir()
    (run / "submitit" / "4711_0_log.out").write_text(ERROR.format(rank=0, error="ValueError: bad"))
    launch = event("launch", job="local-a", log="submitit/4711_0_log.out")
    end = event("end", BEGAN + 200, job="local-a", verdict="failed", status="1", reason="train failed")
    write_events(run, event("start", BEGAN + 100, job="local-a"), launch, end, job="local-a")
    failure = root_failure(run, last(run))
    assert failure is not None
    assert failure.place == "submitit/4711_0_log.out:1"
    write_events(run, event("launch", job="local-a", log="../secret/4711_0_log.out"), job="local-a")
    assert log_files(run, last(run)) == ()
