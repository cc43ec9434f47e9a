"""Where the time of recorded runs went: every second is in one part, and in the right one."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from hpcgen.errors import HpcgenError
from hpcgen.ledger.failures import poisson_bounds
from hpcgen.ledger.ledger import JobFacts, Ledger
from hpcgen.ledger.read import read_ledger
from hpcgen.runs.slurm import Queue, QueuedJob
from tests.ledger.requeued_run import event, line, training, write_jobs, write_requeued_run
from tests.recorded_run import START, start, step, write_run


@pytest.fixture
def requeued(tmp_path: Path) -> Path:
    return write_requeued_run(tmp_path / "run")


def read(run: Path, **options: Any) -> Ledger:
    return read_ledger(run, START + 10_000, **options)


PARTS = {
    "productive": 2 + 99 * 1.5 + 2 + 2,
    "redone": 100,
    "data_wait": 99 * 0.5,
    "evaluation": 10,
    "save": 3 + 5,
    "restore": 40,
    "start_up": (520 - 480) + 80 + 10 + 18 + (1920 - 1800) + 40 + 6 + 2,
    "infrastructure": 80 + 120 + 100,
    "ending": (1000 - 938) + 10,
    "queue": 400 + (1700 - 1121),
    "idle": 1,
    "unaccounted": 0,
}


def test_every_second_of_a_run_is_in_the_right_part(requeued: Path) -> None:
    spent = read(requeued).spent
    assert spent.parts == pytest.approx(PARTS, abs=0.01)
    assert spent.wall_s == pytest.approx(2030)
    assert spent.in_jobs_s == pytest.approx(930)
    assert spent.goodput == pytest.approx(PARTS["productive"] / 930)
    assert spent.goodput_of_wall == pytest.approx(PARTS["productive"] / 2030)


def test_gpus_are_paid_while_a_job_holds_them(requeued: Path) -> None:
    ledger = read(requeued)
    assert ledger.spent.gpu_hours == pytest.approx(3 * 8 * 930 / 3600)
    assert (ledger.cost, ledger.currency) == (pytest.approx(2.5 * 3 * 8 * 930 / 3600), "EUR")


def test_gpus_that_wait_for_a_first_step_are_named(requeued: Path) -> None:
    ledger = read(requeued)
    assert [attempt.idle_s for attempt in ledger.attempts] == pytest.approx([610 - 400, 2006 - 1700])
    [idle] = ledger.too_idle
    assert (idle.job, idle.restart, idle.limit_s) == ("12", 1, 250)


def test_interruptions_and_the_interval_of_saves(requeued: Path) -> None:
    ledger = read(requeued)
    assert (ledger.failures.count, ledger.failures.mean_s) == (1, pytest.approx(930))
    assert [attempt.lost_steps for attempt in ledger.attempts] == [50, 0]
    assert ledger.saving is not None
    assert ledger.saving.stall_s == pytest.approx(4)
    assert ledger.saving.least_lost <= ledger.saving.lost


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(0, 0.0, 2.996), (1, 0.0513, 4.744), (10, 5.425, 16.962), (419, 385.8, 454.2)],
)
def test_bounds_of_a_number_of_failures(count: int, low: float, high: float) -> None:
    """Tabulated values of Garwood's interval for 90%, and the normal approximation of a large number."""
    assert poisson_bounds(count) == pytest.approx((low, high), rel=2e-3)


def test_a_window_has_the_last_part_of_the_time(requeued: Path) -> None:
    ledger = read(requeued, since=START + 2010)
    assert ledger.spent.wall_s == pytest.approx(20)
    assert ledger.spent.parts["productive"] == pytest.approx(2)
    assert ledger.spent.parts["ending"] == pytest.approx(10)
    assert len(ledger.attempts) == 1
    assert read(requeued, since=START + 5000).spent.wall_s == 0


def test_rolling_windows_are_shorter_than_the_run(tmp_path: Path) -> None:
    day = 86400.0
    run = write_run(
        tmp_path / "run",
        [
            start(0, START),
            *(step(n, time=START + n * day, step_time_s=day, data_wait_s=0.0) for n in range(1, 5)),
        ],
    )
    ledger = read_ledger(run, START + 100 * day)
    assert list(ledger.windows) == ["1", "3"]
    assert [spent.wall_s for spent in ledger.windows.values()] == pytest.approx([day, 3 * day])


def test_a_run_of_an_earlier_version_is_divided_as_far_as_it_is_known(tmp_path: Path) -> None:
    """hpcgen 0.2.0 recorded no jobs, pauses or first steps."""
    lost = {"iteration": 30, "time": START + 90}
    run = write_run(
        tmp_path / "run",
        [
            start(0, START),
            *(step(n, time=START + 2 * n, data_wait_s=0.0) for n in range(1, 11)),
            line("checkpoint", 10, 25, path="iter_0000010", stall_s=4.0, write_s=5.0),
            line("evaluation", 10, 30, split="valid", loss=2.0),
            *(step(n, time=START + 12 + 2 * n, data_wait_s=0.0) for n in range(11, 21)),
            start(20, START + 200, lost=lost, checkpoint="iter_0000020"),
            *(step(n, time=START + 160 + 2 * n, data_wait_s=0.0) for n in range(21, 31)),
        ],
    )
    parts = {name: seconds for name, seconds in read(run).spent.parts.items() if seconds}
    assert parts == pytest.approx(
        {"productive": 60, "redone": 90 - 52, "evaluation": 8, "save": 4, "idle": 110}, abs=0.01
    )


def test_a_job_that_never_trained_is_start_up_and_node_checks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_jobs(
        run,
        event("start", 0, nodes="n1"),
        event("launch", 60),
        event("end", 100, verdict="failed", status="1", reason="no trainer"),
    )
    ledger = read(run)
    parts = {name: seconds for name, seconds in ledger.spent.parts.items() if seconds}
    assert parts == pytest.approx({"infrastructure": 60, "start_up": 40})
    assert (ledger.idle_s, ledger.attempts[0].reason) == (pytest.approx(100), "no trainer")


@pytest.mark.parametrize("is_recorded", [True, False])
def test_ranks_that_are_launched_again_in_their_job(tmp_path: Path, is_recorded: bool) -> None:
    """If the script records when the ranks ended, the time before is that of a hang, and not of the node checks."""
    lost = {"iteration": 20, "time": START + 140, "steps_s": 20.0}
    run = write_run(
        tmp_path / "run",
        [
            training(0, 100, restart=0),
            *(step(n, time=START + 100 + 2 * n, data_wait_s=0.0) for n in range(1, 11)),
            training(10, 400, restart=0, checkpoint="iter_0000010", lost=lost),
            *(step(n, time=START + 380 + 2 * n, data_wait_s=0.0) for n in range(11, 21)),
            line("end", 20, 420),
        ],
    )
    write_jobs(
        run,
        event("start", 0, nodes="n1"),
        event("launch", 20),
        *([event("restart_in_job", 200, status="137")] if is_recorded else []),
        event("launch", 300),
        event("end", 420, verdict="done", status="0"),
    )
    parts = read(run).spent.parts
    hang_s = 60 if is_recorded else 0
    assert (parts["ending"], parts["infrastructure"]) == pytest.approx((hang_s, 20 + 160 - hang_s))
    assert (parts["redone"], parts["unaccounted"]) == pytest.approx((20, 0))


@pytest.mark.process
@pytest.mark.parametrize("ended", [False, True])
def test_ranks_that_just_start_again_have_not_died(tmp_path: Path, ended: bool) -> None:
    run = write_run(
        tmp_path / "run",
        [
            training(0, 100, restart=0),
            *(step(n, time=START + 100 + 2 * n, data_wait_s=0.0) for n in range(1, 11)),
        ],
    )
    beat = {
        "time": START + 120,
        "iteration": 10,
        "phase": "train",
        "host": socket.gethostname(),
        "pid": 2**30,
    }
    (run / "heartbeat").write_text(json.dumps(beat))
    end = event("end", 140, verdict="failed", status="137", reason="failed with status 137")
    again = event("restart_in_job", 130, status="137", progress="10")
    write_jobs(run, event("start", 0, nodes="n1"), event("launch", 20), *([end] if ended else [again]))
    ledger = read_ledger(run, START + 150)
    assert (ledger.goes_on, ledger.ended) == ((False, START + 140) if ended else (True, START + 150))
    assert (ledger.spent.parts["redone"], ledger.lost_steps) == ((20, 10) if ended else (0, 0))


def test_an_end_that_nobody_recorded_is_that_of_the_next_requeue(requeued: Path) -> None:
    """A node that fails takes the batch script with it, and Slurm requeues the job."""
    path = requeued / "jobs" / "12" / "events.jsonl"
    kept = [text for text in path.read_text().splitlines(True) if '"verdict": "requeued"' not in text]
    path.write_text("".join(kept))
    parts = read(requeued).spent.parts
    assert (parts["ending"], parts["idle"]) == (pytest.approx(1001 - 938 + 10), 0)


def test_clocks_that_disagree_make_no_time_twice(requeued: Path) -> None:
    path = requeued / "jobs" / "12" / "events.jsonl"
    path.write_text(path.read_text().replace(f"{START + 1000}", f"{START + 930}"))
    spent = read(requeued).spent
    assert sum(spent.parts.values()) == pytest.approx(spent.wall_s) == pytest.approx(2030)


@pytest.mark.parametrize("saved", [True, False])
def test_steps_that_nothing_saved_are_lost_if_the_run_has_failed(requeued: Path, saved: bool) -> None:
    (requeued / "STOPPED").unlink()
    (requeued / "FAILED").write_text("out of memory\n")
    metrics = requeued / "metrics.jsonl"
    if not saved:
        kept = [text for text in metrics.read_text().splitlines(True) if "iter_0000102" not in text]
        metrics.write_text("".join(kept))
    expected = PARTS | ({} if saved else {"redone": 104, "productive": PARTS["productive"] - 4})
    assert read(requeued).spent.parts == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("state", "waits"), [("PENDING", True), ("COMPLETED", False)])
def test_a_requeued_job_that_waits_now_is_queue_time(requeued: Path, state: str, waits: bool) -> None:
    path = requeued / "jobs" / "12" / "events.jsonl"
    path.write_text(path.read_text().replace('"verdict": "failed"', '"verdict": "requeued"'))
    unknown: dict[str, Any] = dict.fromkeys(("submitted", "starts", "ends"))
    texts = dict.fromkeys(("reason", "nodes", "dependency", "user", "name"), "")
    job = QueuedJob(job="12", state=state, log=str(requeued / "train-12.log"), **unknown, **texts)
    ledger = read(requeued, queue=lambda directory: Queue(jobs=(job,)))
    assert ledger.waits is waits
    waited_s = (10_000 - 2030) if waits else 0
    assert ledger.spent.parts["queue"] == pytest.approx(PARTS["queue"] + waited_s)
    assert ledger.spent.in_jobs_s == pytest.approx(930)


def test_a_run_that_goes_on_is_shown_until_now(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [start(0, START), *(step(n, data_wait_s=0.0) for n in range(1, 6))])
    note = line("step", 7, 14, steps=2, step_time_s=2.0)
    (run / "last-step.json").write_text(json.dumps(note))
    ledger = read_ledger(run, START + 15)
    assert ledger.goes_on
    assert ledger.spent.parts["productive"] == pytest.approx(15)


HOSTILE = {
    "a text": "now",
    "a truncated line": '{"event": "start", "iterat',
    "a nested list": "[" * 100_000,
    "other types": json.dumps(training(0, 600, restart=0) | {"phases_s": [1], "lost": "x", "restart": "1"}),
    "negative times": json.dumps(step(3, step_time_s=-5.0, save_s=-1.0)),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_lines_that_others_wrote_do_no_harm(requeued: Path, text: str) -> None:
    for name in ("metrics.jsonl", "jobs/12/events.jsonl", "last-step.json", "jobs/12/machine.json"):
        with (requeued / name).open("a") as file:
            file.write(text)
    spent = read(requeued).spent
    assert sum(spent.parts.values()) == pytest.approx(spent.wall_s)


def test_a_directory_without_a_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HpcgenError, match="no attempt to account for"):
        read(tmp_path)
    with pytest.raises(HpcgenError, match="no such directory"):
        read(tmp_path / "absent")


def test_a_price_of_the_profile_counts_where_the_job_has_none(requeued: Path) -> None:
    write = requeued / "jobs" / "12" / "machine.json"
    write.write_text(json.dumps({"gpus_per_node": 8}))
    assert read(requeued).cost is None
    priced = read(requeued, price=JobFacts(price_per_gpu_hour=1.0, currency="CHF"))
    assert (priced.cost, priced.currency) == (pytest.approx(3 * 8 * 930 / 3600), "CHF")
