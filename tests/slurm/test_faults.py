"""Training that is killed and stopped again and again on a real Slurm: what is lost, and what must not differ."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcgen.ledger.read import read_ledger
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import TWO_RANKS, make_run
from tests.slurm.long_run import SAVE_INTERVAL, LongRun, fork_of
from trainer.contract.files import checkpoint_files

SUBMITTED_EACH_TIME = ("slurm.train.max_restarts=0",)
"""Avoids the ten seconds that a requeued job waits."""


def kill_often(run: LongRun, kills: int, inside: int, choose: random.Random) -> None:
    """Kills attempts at random steps and in random saves, until `inside` of them were in the middle of a save."""
    while len(run.attempts) < kills or sum(attempt.cut_off is not None for attempt in run.attempts) < inside:
        run.wait_for_attempt()
        if choose.random() < 0.5:
            run.wait_for_save(choose.randint(1, 2))
        else:
            run.wait_for_step(choose.randint(1, 2 * SAVE_INTERVAL))
        time.sleep(choose.random() * 0.03)
        run.kill(choose.sample(range(len(run.ranks)), choose.randint(1, len(run.ranks))))


def stop_often(run: LongRun, stops: int, choose: random.Random) -> None:
    """Stops attempts at random steps with the signal that Slurm sends before the time limit."""
    for _ in range(stops):
        run.wait_for_attempt()
        run.wait_for_step(choose.randint(1, 2 * SAVE_INTERVAL))
        time.sleep(choose.random() * 0.03)
        run.warn()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "inside", "overrides"), [(1, 1, SUBMITTED_EACH_TIME), (50, 15, TWO_RANKS)])
def test_kills_and_stops_change_no_step(
    slurm_cluster: SlurmCluster,
    tmp_path: Path,
    byte_corpus: Path,
    stand_in: str,
    count: int,
    inside: int,
    overrides: tuple[str, ...],
) -> None:
    """One run is killed `count` times, `inside` of them in the middle of a save, and another one stopped as often.

    A kill costs the steps since the newest complete checkpoint. That checkpoint is at most one save interval old, or
    was at the start of the interrupted save, which runs concurrently with the next steps.
    """
    iterations = 3 * SAVE_INTERVAL * (count + 1)
    longer = (f"training.train_iters={iterations}", f"optimizer.lr_decay_iters={iterations}", *overrides)

    def begin(name: str) -> LongRun:
        (tmp_path / name).mkdir()
        return LongRun(slurm_cluster, make_run(tmp_path / name, byte_corpus), *longer, python=stand_in)

    killed, stopped, undisturbed = map(begin, ("killed", "stopped", "undisturbed"))
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    with ThreadPoolExecutor(2) as threads:
        faults = [
            threads.submit(kill_often, killed, count, inside, random.Random(seed)),
            threads.submit(stop_often, stopped, count, random.Random(seed)),
        ]
        expected = undisturbed.wait_for_end()
        for fault in faults:
            fault.result()
    for run in (killed, stopped):
        assert run.wait_for_end() == expected
        for attempt in run.attempts:
            assert attempt.steps.items() <= expected.items(), "what is computed twice is the same both times"
        for checkpoint in checkpoint_files.list_checkpoints(run.checkpoints):
            assert checkpoint_files.problems(checkpoint, hashes=True) == []
    assert list(expected) == list(range(1, iterations + 1))

    assert [attempt.last for attempt in stopped.attempts] == stopped.starts()[1:]
    ended = list(zip(killed.attempts, killed.starts()[1:], strict=True))
    for attempt, next_start in ended:
        assert (attempt.last if attempt.cut_off is None else attempt.cut_off) - next_start <= SAVE_INTERVAL
    redone = [attempt.last - next_start for attempt, next_start in ended]
    ledger = read_ledger(killed.directory, time.time())
    assert (ledger.failures.count, ledger.lost_steps) == (len(ended), sum(redone))
    assert ledger.spent.parts["unaccounted"] < 0.01 * ledger.spent.wall_s
    num_inside = sum(attempt.cut_off is not None for attempt in killed.attempts)
    print(
        f"{len(ended)} kills, {num_inside} of them inside a save: {max(redone)} steps done again at most, "
        f"{sum(redone)} in all; {len(stopped.attempts)} stops, no step done again"
    )


@pytest.mark.slow
def test_a_rank_that_dies_and_one_that_hangs_each_end_an_attempt(
    slurm_cluster: SlurmCluster, tmp_path: Path, byte_corpus: Path, stand_in: str
) -> None:
    endless = ("training.train_iters=100000", "optimizer.lr_decay_iters=100000")
    timeout = "training.distributed_timeout_seconds_after_init=10"
    run = LongRun(
        slurm_cluster, make_run(tmp_path, byte_corpus), *TWO_RANKS, *endless, timeout, python=stand_in
    )
    run.wait_for_attempt()
    run.kill([1])
    run.wait_for_attempt()
    log = run.log()
    assert (
        "lost its peers" in log
        or "rank 1 did not receive it or died, so the others leave without saving" in log
    )
    assert "back into the queue (restart 1 of at most 1)" in log

    os.kill(fork_of(run.ranks[1]), signal.SIGSTOP)
    assert slurm_cluster.wait(run.job_id) == "FAILED"
    assert "hung: no progress for " in run.log()
    assert "Look first at rank 1 on " in run.log()
    assert "failed with status " in run.log().splitlines()[-1]
    # Rank 0 waits for rank 1 in a step or in a save.
    assert "/trainer/loop.py" in (run.directory / "stacks" / "rank-00000.txt").read_text()
    assert not (run.directory / "STOPPED").exists()
    assert not (run.directory / "FAILED").exists(), "another try may do"
