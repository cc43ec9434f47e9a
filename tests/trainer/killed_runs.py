"""Trainings that are killed and resume, with a record of their steps that does not depend on the trainer's own."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.patience import wait_until
from tests.trainer.forked import ForkedPython
from tests.trainer.runs import environment, free_port

RECORDING = """
import os, sys, time
from trainer.distributed import device
device.prepare("cpu")
from trainer import loop
file = os.open(os.environ["RECORDED_STEPS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
train_step = loop.train_step
def recorded(state, *arguments, **others):
    began = time.time()
    result = train_step(state, *arguments, **others)
    os.write(file, f"{state.iteration} {began} {time.time()}\\n".encode())
    return result
loop.train_step = recorded
from trainer.__main__ import main
sys.exit(main())
"""


@dataclass(frozen=True)
class Step:
    """A step as the wrapped function saw it."""

    iteration: int
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True)
class Recorded:
    """The steps of one attempt, and when it was killed."""

    steps: tuple[Step, ...]
    killed: float | None

    def lost_s(self, resumed: int) -> float:
        """Seconds of the steps after the iteration from which the next attempt resumed, as far as the kill."""
        lost = [step for step in self.steps if step.iteration > resumed]
        return sum(step.seconds for step in lost) + self.interrupted_s

    @property
    def interrupted_s(self) -> float:
        """Seconds from the end of the last step to the kill, in which the next step began."""
        return max(0.0, self.killed - self.steps[-1].ended) if self.killed and self.steps else 0.0

    @property
    def longest_s(self) -> float:
        """Seconds of the longest step, be it completed or interrupted by the kill."""
        return max(self.interrupted_s, *(step.seconds for step in self.steps))


def train_with_kills(config: dict[str, Any], kills: int, seed: int) -> list[Recorded]:
    """Kills a training at random steps, at random moments of them, and lets the last attempt finish."""
    chance = random.Random(seed)
    directory = Path(config["run_dir"])
    directory.mkdir(parents=True)
    attempts = []
    for number in range(kills + 1):
        config["logging"]["log_interval"] = chance.choice((1, 3, 7))
        (directory / "config.json").write_text(json.dumps(config))
        steps = directory / f"steps-{number}"
        process = ForkedPython(
            ["-c", RECORDING, "--config", str(directory / "config.json")],
            environment(0, 1, free_port()) | {"RECORDED_STEPS": str(steps)},
            directory / "log",
        )
        killed = None
        if number < kills:
            wanted = chance.randint(1, 9)

            def has_come_so_far(file: Path = steps, wanted: int = wanted) -> bool:
                return len(list(read_steps(file))) >= wanted

            wait_until(has_come_so_far, (directory / "log").read_text, interval_s=0.003)
            time.sleep(chance.uniform(0.0, 0.08))
            killed = time.time()
            process.kill()
        process.wait()
        attempts.append(Recorded(tuple(read_steps(steps)), killed))
    return attempts


def read_steps(file: Path) -> Iterator[Step]:
    for line in file.read_text().splitlines() if file.exists() else ():
        iteration, began, ended = line.split()
        yield Step(int(iteration), float(began), float(ended))


def log(directory: Path) -> str:
    return os.fsdecode((directory / "log").read_bytes())
