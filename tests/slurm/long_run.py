"""A training with many attempts on a real Slurm, which is killed and stopped from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.patience import PATIENCE_S
from tests.slurm.cluster import FINAL_STATES, SlurmCluster
from tests.slurm.conftest import log_of, profile_text, ranks_of, render
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
        self.cluster, self._run = cluster, run
        self.directory = run.parent / "run"
        skip_import_check(run, python)
        self._script = render(run, *SMALL, *overrides)
        self.job_id = ""
        self.checkpoints = self.directory / "checkpoints"
        self.attempts: list[Attempt] = []
        """Attempts that have ended, in order."""
        self.ranks: list[int] = []
        """PIDs of the current attempt, by rank."""
        self.submit()

    def wait_for_attempt(self) -> None:
        """Returns after the first step of the next attempt."""
        self._wait(lambda: self._num_attempts() > len(self.attempts) and self._num_steps() > 0, submits=True)
        self.ranks = ranks_of(self.cluster, self.job_id)

    def wait_for_end(self) -> dict[int, Values]:
        """Waits for the last save and the end of the job. Returns all steps."""
        self._wait(self._is_done, submits=True)
        assert self.cluster.wait(self.job_id) == "COMPLETED", self.log()
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
        self.note_end()

    def warn(self) -> None:
        """Sends the signal that Slurm sends before the time limit. Returns when all processes have ended."""
        self.cluster.run("scancel", "--batch", "--signal=USR2", self.job_id)
        self.note_end()

    def starts(self) -> list[int]:
        """The iteration from which each attempt resumed."""
        lines = self._metrics().splitlines()
        return [json.loads(line)["iteration"] for line in lines if '"event": "start"' in line]

    def submit(self) -> None:
        """Submits the script."""
        self.job_id = self.cluster.sbatch(self._script, cwd=self._run.parent)

    def note_end(self) -> None:
        """Waits until all processes of this attempt have ended, and notes what it left."""
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
                self.submit_again()
                looked = now
            time.sleep(0.01)

    def submit_again(self) -> None:
        """Submits the script if its job has given up."""
        state = self.cluster.state(self.job_id)
        if state in FINAL_STATES - {"COMPLETED"}:
            assert state == "FAILED", self.log()
            assert not (self.directory / "FAILED").exists(), self.log()
            self.submit()

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
