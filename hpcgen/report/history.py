"""Reads metrics.jsonl into columns of steps and lists of the rarer events. Times are Unix seconds."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcgen.errors import HpcgenError
from hpcgen.text import counted

Event = dict[str, Any]
Column = NDArray[np.float64]

COLUMNS = (
    "time",
    "steps",
    "loss",
    "grad_norm",
    "lr",
    "loss_scale",
    "batch_size",
    "consumed_samples",
    "step_time_s",
    "tokens_per_s",
    "model_tflops_per_device",
    "mfu",
    "peak_memory_gib",
    "data_wait_s",
    "communication_s",
    "update_s",
    "idle_s",
    "skipped",
)
"""What is read of a step, as a number; NaN where a line has none."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the run, up to its end or to the last line so far."""

    start: Event
    last_iteration: int
    """Of the steps that still count: what a later attempt did again is that attempt's."""
    last_time: float | None
    stop_reason: str | None
    """What the attempt said when it left early."""

    @property
    def began(self) -> float | None:
        """When its first line was written."""
        return number_or_none(self.start.get("time"))

    @property
    def iteration(self) -> int:
        """The iteration that it went on from."""
        return int(self.start["iteration"])

    @property
    def lost_iteration(self) -> int | None:
        """How far the attempt before had come when that is further; those steps are done again."""
        found = self._lost.get("iteration")
        return found if type(found) is int else None

    @property
    def lost_time(self) -> float | None:
        """When it had come that far."""
        return number_or_none(self._lost.get("time"))

    @property
    def _lost(self) -> Event:
        found = self.start.get("lost")
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, kw_only=True)
class History:
    """Everything that a run recorded. The steps are in order, and each counts once."""

    iteration: NDArray[np.int64]
    columns: dict[str, Column]
    attempts: tuple[Attempt, ...]
    evaluations: tuple[Event, ...]
    spikes: tuple[Event, ...]
    checkpoints: tuple[Event, ...]
    stragglers: tuple[Event, ...]
    unreadable_lines: int
    """Lines that are not what a trainer writes; a last line that is still being written is none."""

    @property
    def start(self) -> Event:
        """The start of the last attempt."""
        return self.attempts[-1].start if self.attempts else {}

    @property
    def weights(self) -> Column:
        """Steps that each line is the mean of; where it does not say, those since the line before."""
        since = np.diff(self.iteration, prepend=self.attempts[0].iteration if self.attempts else 0)
        said = self.columns["steps"]
        return np.where(np.isfinite(said), said, np.maximum(since, 1)).astype(float)


def read_history(metrics: Path) -> History:
    """The history in a metrics.jsonl, which may be growing, and may hold events that are not known here.

    Raises:
        HpcgenError: it is not there, or holds no step.
        OSError: it cannot be read.
    """
    reader = _Reader()
    try:
        with metrics.open("rb") as file:
            reader.read(file)
    except FileNotFoundError:
        hint = "name the directory of a training run (paths.run_dir), in which the trainer writes it"
        raise HpcgenError(f"{metrics}: no such file", hint) from None
    if not reader.iterations:
        what = "the run has started and has not done a step yet" if reader.attempts else "it holds no step"
        why = f": {passed_over}" if (passed_over := reader.passed_over()) else ""
        raise HpcgenError(f"{metrics}: there is nothing to show, {what}{why}")
    return reader.history()


def number_or_none(value: object) -> float | None:
    """A finite number as it is, and nothing else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return None


class _Reader:
    """Takes the lines one by one."""

    def __init__(self) -> None:
        self.iterations = array("q")
        self.columns = {name: array("d") for name in COLUMNS}
        self.attempts: list[_OpenAttempt] = []
        self.rare: dict[str, list[Event]] = {
            name: [] for name in ("evaluation", "spike", "checkpoint", "straggler")
        }
        self.lines = 0
        self.unreadable = 0
        self._first_unreadable: tuple[int, bytes] | None = None
        self._is_torn = False

    def read(self, lines: Iterable[bytes]) -> None:
        for self.lines, line in enumerate(lines, 1):
            event = _decode(line)
            if event is not None:
                self._take(event)
            elif not line.isspace():
                self._first_unreadable = self._first_unreadable or (self.lines, line)
                self._is_torn = not line.endswith(b"\n")
                self.unreadable += not self._is_torn

    def passed_over(self) -> str:
        """What is wrong with the first line that cannot be read, and how many there are; empty without any."""
        if self._first_unreadable is None:
            return ""
        number, line = self._first_unreadable
        what = "is no line of a trainer" if _is_json(line) else "is not JSON"
        return f"line {number} {what}; {self.unreadable + self._is_torn} of {counted(self.lines, 'line')} passed over"

    def history(self) -> History:
        return History(
            iteration=np.array(self.iterations, dtype=np.int64),
            columns={name: np.array(column, dtype=np.float64) for name, column in self.columns.items()},
            attempts=tuple(attempt.closed() for attempt in self.attempts),
            evaluations=tuple(self.rare["evaluation"]),
            spikes=tuple(self.rare["spike"]),
            checkpoints=tuple(self.rare["checkpoint"]),
            stragglers=tuple(self.rare["straggler"]),
            unreadable_lines=self.unreadable,
        )

    def _take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "step":
            self._take_step(event)
        elif kind == "start":
            self._forget_after(event["iteration"])
            self.attempts.append(_OpenAttempt(event))
        elif kind in self.rare:
            self.rare[kind].append(event)
        if self.attempts:
            self.attempts[-1].see(event)

    def _take_step(self, event: Event) -> None:
        if self.iterations and event["iteration"] <= self.iterations[-1]:
            self._forget_after(event["iteration"] - 1)
        self.iterations.append(event["iteration"])
        for name, column in self.columns.items():
            value = event.get(name)
            column.append(value if isinstance(value, int | float) and math.isfinite(value) else math.nan)

    def _forget_after(self, iteration: int) -> None:
        """Drops what is done again. The trainer does so at a resume; a copy of its file may be older."""
        while self.iterations and self.iterations[-1] > iteration:
            self.iterations.pop()
            for column in self.columns.values():
                column.pop()
        for name, events in self.rare.items():
            if events and events[-1]["iteration"] > iteration:
                self.rare[name] = [event for event in events if event["iteration"] <= iteration]
        for attempt in self.attempts:
            attempt.last_iteration = max(attempt.iteration, min(attempt.last_iteration, iteration))


class _OpenAttempt:
    """An attempt whose end may still come."""

    def __init__(self, start: Event) -> None:
        self.start = start
        self.iteration = self.last_iteration = int(start["iteration"])
        self._last_time: float | None = None
        self._stop_reason: str | None = None

    def see(self, event: Event) -> None:
        time = number_or_none(event.get("time"))
        self._last_time = self._last_time if time is None else time
        if event["event"] == "step":
            self.last_iteration = event["iteration"]
        elif event["event"] == "stop":
            self._stop_reason = str(event.get("reason") or "asked to stop")

    def closed(self) -> Attempt:
        return Attempt(
            start=self.start,
            last_iteration=self.last_iteration,
            last_time=self._last_time,
            stop_reason=self._stop_reason,
        )


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _decode(line: bytes) -> Event | None:
    """The event of a line; None when it is not one."""
    event: Any
    try:
        event = msgspec.json.decode(line)
    except msgspec.DecodeError:
        try:
            event = json.loads(line)  # the standard library writes and reads NaN, which JSON has no word for
        except (ValueError, RecursionError):
            return None
    if (
        isinstance(event, dict)
        and isinstance(event.get("event"), str)
        and type(event.get("iteration")) is int
    ):
        return event
    return None
