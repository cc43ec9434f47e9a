"""Training that is killed and stopped again and again on a real Slurm: what is lost, and what must not differ."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcgen.ledger.read import read_ledger
from tests.patience import PATIENCE_S
from tests.slurm.cluster import FINAL_STATES, SlurmCluster
from tests.slurm.conftest import TWO_RANKS, log_of, make_run, profile_text, ranks_of, render
from trainer.contract.files import checkpoint_files

SAVE_INTERVAL = 12
SMALL = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.seq_length=32",
    "training.micro_batch_size=1",
    "training.global_batch_size=2",
    "training.eval_iters=0",
    f"checkpoint.save_interval={SAVE_INTERVAL}",
    "logging.tensorboard=false",
    'slurm.train.time="30:00"',
    "slurm.train.max_restarts=1",
)
"""Steps of some hundredths of a second, saves that take about as long, and at most one requeue per job."""

SUBMITTED_EACH_TIME = ("slurm.train.max_restarts=0",)
"""Avoids the ten seconds that a requeued job waits."""

Values = tuple[float, float, float]
"""Loss, gradient norm and learning rate of a step."""


@dataclass(frozen=True)
class Attempt:
    """The remains of an attempt that was killed or stopped."""

    start: int
    """The iteration from which it resumed."""
    steps: dict[int, Values]
    cut_off: int | None
    """The iteration of a save that it did not complete; None without one."""

    @property
    def last(self) -> int:
        """The last step in its metrics."""
        return max(self.steps, default=self.start)


class LongRun:
    """A run with many attempts. Whenever its job gives up, the script is submitted again."""

    def __init__(self, cluster: SlurmCluster, run: Path, *overrides: str, python: str) -> None:
        self._cluster, self._run = cluster, run
        self.directory = run.parent / "run"
        skip_import_check(run, python)
        self._script = render(run, *SMALL, *overrides)
        self.job_id = ""
        self.checkpoints = self.directory / "checkpoints"
        self.attempts: list[Attempt] = []
        """Attempts that have ended, in order."""
        self.ranks: list[int] = []
        """PIDs of the current attempt, by rank."""
        self._submit()

    def wait_for_attempt(self) -> None:
        """Returns after the first step of the next attempt."""
        self._wait(lambda: self._num_attempts() > len(self.attempts) and self._num_steps() > 0, submits=True)
        self.ranks = ranks_of(self._cluster, self.job_id)

    def wait_for_end(self) -> dict[int, Values]:
        """Waits for the last save and the end of the job. Returns all steps."""
        self._wait(self._is_done, submits=True)
        assert self._cluster.wait(self.job_id) == "COMPLETED", self.log()
        return steps(self._metrics())

    def wait_for_step(self, number: int) -> None:
        """Returns after `number` steps of this attempt."""
        self._wait(lambda: self._num_steps() >= number)

    def wait_for_save(self, number: int) -> None:
        """Returns while the `number`-th save of this attempt, or a later one, is being written."""
        first = self.starts()[-1] + number * SAVE_INTERVAL

        def is_saving() -> bool:
            newest = max(self.checkpoints.glob("iter_???????"), default=None)
            return (
                newest is not None
                and newest >= checkpoint_files.iteration_directory(self.checkpoints, first)
                and not (newest / checkpoint_files.COMPLETE).exists()
            )

        self._wait(is_saving)

    def kill(self, numbers: Iterable[int]) -> None:
        """Kills the given ranks with SIGKILL. Returns when all processes have ended."""
        for number in numbers:
            os.kill(self.ranks[number], signal.SIGKILL)
        self._note_end()

    def warn(self) -> None:
        """Sends the signal that Slurm sends before the time limit. Returns when all processes have ended."""
        self._cluster.run("scancel", "--batch", "--signal=USR2", self.job_id)
        self._note_end()

    def starts(self) -> list[int]:
        """The iteration from which each attempt resumed."""
        lines = self._metrics().splitlines()
        return [json.loads(line)["iteration"] for line in lines if '"event": "start"' in line]

    def _submit(self) -> None:
        self.job_id = self._cluster.sbatch(self._script, cwd=self._run.parent)

    def _note_end(self) -> None:
        self._wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in self.ranks))
        lines = self._metrics().splitlines()
        begun = max(number for number, line in enumerate(lines) if '"event": "start"' in line)
        found = checkpoint_files.list_checkpoints(self.checkpoints)
        cut_off = [checkpoint.iteration for checkpoint in found if checkpoint.is_cut_off]
        assert len(cut_off) <= 1, "one save at a time"
        self.attempts.append(
            Attempt(
                start=json.loads(lines[begun])["iteration"],
                steps=steps("\n".join(lines[begun:])),
                cut_off=cut_off[0] if cut_off else None,
            )
        )

    def _metrics(self) -> str:
        path = self.directory / "metrics.jsonl"
        return path.read_text() if path.exists() else ""

    def _num_attempts(self) -> int:
        return self._metrics().count('"event": "start"')

    def _num_steps(self) -> int:
        return self._metrics().rpartition('"event": "start"')[2].count('"event": "step"')

    def _is_done(self) -> bool:
        return (self.directory / "DONE").exists()

    def _wait(self, condition: Callable[[], bool], *, submits: bool = False) -> None:
        """Waits for a condition. With `submits`, the script is submitted again if its job has given up."""
        begun = looked = time.monotonic()
        while not condition():
            if self._is_done():
                assert condition(), "the run is too short for all that is to happen"
                return
            now = time.monotonic()
            assert now < begun + PATIENCE_S, self.log()
            if submits and now > looked + 1:
                self._submit_again()
                looked = now
            time.sleep(0.01)

    def _submit_again(self) -> None:
        """Submits the script if its job has given up."""
        state = self._cluster.state(self.job_id)
        if state in FINAL_STATES - {"COMPLETED"}:
            assert state == "FAILED", self.log()
            assert not (self.directory / "FAILED").exists(), self.log()
            self._submit()

    def log(self) -> str:
        """Log of the last job."""
        return log_of(self._run, self.job_id)


def skip_import_check(run: Path, interpreter: str) -> None:
    """Skips the script's import check, which would take a third of the time of these attempts."""
    python = run.parent / "python"
    python.write_text(f'#!/bin/bash\n[[ "$*" == *--versions ]] || exec {interpreter} "$@"\n')
    python.chmod(0o755)
    (run.parent / "cluster.yaml").write_text(profile_text(python))


def fork_of(program: int) -> int:
    """The process that trains for this process of the stand-in program: the fork that has its standard output."""
    output = Path(f"/proc/{program}/fd/1").readlink()
    [fork] = [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if _has_output(process, output) and "prepared_python" in (process / "cmdline").read_text()
    ]
    return fork


def _has_output(process: Path, output: Path) -> bool:
    with contextlib.suppress(OSError):
        return (process / "fd/1").readlink() == output
    return False


def steps(metrics: str) -> dict[int, Values]:
    """The recorded steps by iteration. Each must occur once."""
    lines = [json.loads(line) for line in metrics.splitlines() if '"event": "step"' in line]
    found = {line["iteration"]: (line["loss"], line["grad_norm"], line["lr"]) for line in lines}
    assert len(found) == len(lines)
    return found


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
