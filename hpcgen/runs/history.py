"""Reads metrics.jsonl into columns of steps and lists of rarer events. Times are Unix times in seconds."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcgen.errors import HpcgenError
from hpcgen.text import counted
from trainer.contract.files import metrics_line
from trainer.contract.files.metrics_columns import (
    NUMBERS_OF_STEP,
    OF_OBJECTIVE,
    is_mtp_loss,
    own_name_problem,
)
from trainer.contract.files.metrics_line import Event, number_or_none
from trainer.contract.files.regular_file import open_regular
from trainer.contract.wording import ASKED_TO_STOP

Column = NDArray[np.float64]

COLUMNS = NUMBERS_OF_STEP
"""Numeric fields of a step; NaN if a line has no value. The columns that only some runs have follow."""


MAX_COLUMNS = 200
"""Limit of columns, since a file of others could name any number."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt of the run, from its start to its end or to the last line so far."""

    start: Event
    last_iteration: int
    """Last step that was kept. Steps repeated by a later attempt belong to that attempt."""
    last_time: float | None
    stop_reason: str | None
    """Reason recorded when the attempt stopped early."""
    first_step: Event | None = None
    """Its first step, even if it was repeated later. None if it has none, or for a trainer of 0.2.0."""
    end: Event | None = None
    """End of its loop; None if it was killed, its last steps were repeated, or for a trainer of 0.2.0."""

    @property
    def began(self) -> float | None:
        """Time of the attempt's first line."""
        return number_or_none(self.start.get("time"))

    @property
    def iteration(self) -> int:
        """Iteration from which the attempt resumed."""
        return int(self.start["iteration"])

    @property
    def lost_iteration(self) -> int | None:
        """Last iteration of the previous attempt, if it is later than `iteration`; the steps between are repeated."""
        found = self.lost.get("iteration")
        return found if type(found) is int else None

    @property
    def lost_time(self) -> float | None:
        """Time at which the previous attempt reached `lost_iteration`."""
        return number_or_none(self.lost.get("time"))

    @property
    def lost(self) -> Event:
        """Sums over the lines of the previous attempt that were dropped; empty if none were."""
        found = self.start.get("lost")
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the data (data.stages) that the run has read."""

    name: str
    after: int
    """Iteration of the last step before it, as far as lines show."""


@dataclass(frozen=True, kw_only=True)
class History:
    """Everything that a run recorded. Steps are in order and without repetitions."""

    iteration: NDArray[np.int64]
    attempt: NDArray[np.int64]
    """Index of the attempt of each step; -1 before the first start."""
    columns: dict[str, Column]
    stages: tuple[Stage, ...]
    """Stages of the data in the order of the steps; empty for a run without data.stages."""
    losses: tuple[str, ...]
    """Columns for what steps minimize and its parts, if this is not just the loss."""
    metrics: tuple[str, ...]
    """Columns for metrics of the user."""
    attempts: tuple[Attempt, ...]
    evaluations: tuple[Event, ...]
    spikes: tuple[Event, ...]
    checkpoints: tuple[Event, ...]
    stragglers: tuple[Event, ...]
    expert_loads: tuple[Event, ...]
    """Load of each expert, of every hundredth step or so."""
    unreadable_lines: int
    """Number of lines that the trainer did not write. A last line that is still being written does not count."""

    @property
    def mtp_losses(self) -> list[str]:
        """Names of the columns with the losses of MTP layers, from the first layer to the last."""
        return [name for name in self.columns if is_mtp_loss(name)]

    @property
    def start(self) -> Event:
        """Start event of the last attempt."""
        return self.attempts[-1].start if self.attempts else {}

    @property
    def weights(self) -> Column:
        """Number of steps that each line averages. Default: the steps since the previous line."""
        since = np.diff(self.iteration, prepend=self.attempts[0].iteration if self.attempts else 0)
        steps = self.columns["steps"]
        return np.where(np.isfinite(steps), steps, np.maximum(since, 1)).astype(float)


def read_history(metrics: Path, *, needs_step: bool = True) -> History:
    """Reads a metrics.jsonl. The file may still be growing and may contain unknown events.

    Raises:
        HpcgenError: the file has no step, and `needs_step`.
        OSError: the file cannot be read.
    """
    reader = _Reader()
    with open_regular(metrics) as file:
        reader.read(file)
    if needs_step and not reader.iterations:
        what = "the run has started but has not completed a step yet" if reader.attempts else "it has no step"
        why = f" ({ignored})" if (ignored := reader.ignored()) else ""
        raise HpcgenError(f"nothing to show, because {what}{why}", where=metrics)
    return reader.history()


class _Reader:
    """Collects the events of a metrics.jsonl."""

    def __init__(self) -> None:
        self.iterations, self.attempt_of = array("q"), array("q")
        self.stage_of: list[str | None] = []
        self.columns = {name: array("d") for name in COLUMNS}
        self.attempts: list[_OpenAttempt] = []
        self.rare: dict[str, list[Event]] = {
            name: [] for name in ("evaluation", "spike", "checkpoint", "straggler", "experts")
        }
        self.mtp_layers = 0
        self.named: dict[str, list[str]] = {"losses": [], "metrics": []}
        self.lines = 0
        self.unreadable = 0
        self._first_unreadable: tuple[int, bytes] | None = None
        self._is_torn = False

    def read(self, lines: Iterable[bytes]) -> None:
        for self.lines, line in enumerate(lines, 1):
            event = decode(line)
            if event is not None:
                self._take(event)
            elif not line.isspace():
                self._first_unreadable = self._first_unreadable or (self.lines, line)
                self._is_torn = not line.endswith(b"\n")
                self.unreadable += not self._is_torn

    def ignored(self) -> str:
        """Describes the first unreadable line and the number of such lines; empty if there are none."""
        if self._first_unreadable is None:
            return ""
        number, line = self._first_unreadable
        what = "was not written by the trainer" if _is_json(line) else "is not JSON"
        return f"line {number} {what}; {self.unreadable + self._is_torn} of {counted(self.lines, 'line')} ignored"

    def history(self) -> History:
        return History(
            iteration=np.array(self.iterations, dtype=np.int64),
            attempt=np.array(self.attempt_of, dtype=np.int64),
            columns={name: np.array(column, dtype=np.float64) for name, column in self.columns.items()},
            stages=tuple(self._stages()),
            losses=tuple(self.named["losses"]),
            metrics=tuple(self.named["metrics"]),
            attempts=tuple(attempt.closed() for attempt in self.attempts),
            evaluations=tuple(self.rare["evaluation"]),
            spikes=tuple(self.rare["spike"]),
            checkpoints=tuple(self.rare["checkpoint"]),
            stragglers=tuple(self.rare["straggler"]),
            expert_loads=tuple(self.rare["experts"]),
            unreadable_lines=self.unreadable,
        )

    def _stages(self) -> Iterator[Stage]:
        name, after = None, self.attempts[0].iteration if self.attempts else 0
        for iteration, of_step in zip(self.iterations, self.stage_of, strict=True):
            if of_step is not None and of_step != name:
                yield Stage(name=of_step, after=after)
            name, after = of_step, iteration

    def _take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "step":
            self._take_step(event)
        elif kind == "start":
            self._forget_after(event["iteration"])
            self.attempts.append(_OpenAttempt(event))
            for key, names in self.named.items():
                names += self._new_columns(event.get(key))
        elif kind in self.rare:
            self.rare[kind].append(event)
        if self.attempts:
            self.attempts[-1].see(event)

    def _new_columns(self, names: object) -> Iterator[str]:
        """Add the columns that a start names. Yields those of the user, and those of the objective."""
        for name in names if isinstance(names, list) else ():
            is_own = isinstance(name, str) and (name in OF_OBJECTIVE or not own_name_problem(name))
            if is_own and name not in self.columns and len(self.columns) < MAX_COLUMNS:
                self.columns[name] = array("d", [math.nan]) * len(self.iterations)
                yield name

    def _take_step(self, event: Event) -> None:
        if self.iterations and event["iteration"] <= self.iterations[-1]:
            self._forget_after(event["iteration"] - 1)
        while (name := f"mtp_{self.mtp_layers + 1}_loss") in event:
            self.columns[name] = array("d", [math.nan]) * len(self.iterations)
            self.mtp_layers += 1
        self.iterations.append(event["iteration"])
        self.attempt_of.append(len(self.attempts) - 1)
        self.stage_of.append(event.get("stage"))
        event = self._with_tokens(event)
        for name, column in self.columns.items():
            value = event.get(name)
            column.append(value if isinstance(value, int | float) and math.isfinite(value) else math.nan)

    def _with_tokens(self, event: Event) -> Event:
        """The event of a step with the number of tokens, which lines of earlier versions lack."""
        start = self.attempts[-1].start if self.attempts else {}
        samples, per_sample = (
            number_or_none(found) for found in (event.get("consumed_samples"), start.get("tokens_per_sample"))
        )
        if "consumed_tokens" in event or samples is None or per_sample is None:
            return event
        return {**event, "consumed_tokens": samples * per_sample}

    def _forget_after(self, iteration: int) -> None:
        """Drops repeated steps. The trainer drops them when it resumes, but a copy of its file may predate that."""
        while self.iterations and self.iterations[-1] > iteration:
            self.iterations.pop()
            self.attempt_of.pop()
            self.stage_of.pop()
            for column in self.columns.values():
                column.pop()
        for name, events in self.rare.items():
            if events and events[-1]["iteration"] > iteration:
                self.rare[name] = [event for event in events if event["iteration"] <= iteration]
        for attempt in self.attempts:
            attempt.last_iteration = max(attempt.iteration, min(attempt.last_iteration, iteration))


class _OpenAttempt:
    """An attempt that may still be running."""

    def __init__(self, start: Event) -> None:
        self.start = start
        self.iteration = self.last_iteration = int(start["iteration"])
        self._last_time: float | None = None
        self._stop_reason: str | None = None
        self._first_step: Event | None = None
        self._end: Event | None = None

    def see(self, event: Event) -> None:
        time = number_or_none(event.get("time"))
        self._last_time = self._last_time if time is None else time
        if event["event"] == "step":
            self.last_iteration = event["iteration"]
        elif event["event"] == "stop":
            self._stop_reason = str(event.get("reason") or ASKED_TO_STOP)
        elif event["event"] == "first_step":
            self._first_step = event
        elif event["event"] == "end":
            self._end = event

    def closed(self) -> Attempt:
        return Attempt(
            start=self.start,
            last_iteration=self.last_iteration,
            last_time=self._last_time,
            stop_reason=self._stop_reason,
            first_step=self._first_step,
            end=self._end,
        )


NO_HISTORY = _Reader().history()
"""The history of a run that has recorded nothing."""


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def decode(line: bytes) -> Event | None:
    """The event in a line; None if it is no event. msgspec reads nearly all lines in a fraction of json's time."""
    try:
        event = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return metrics_line.decode(line)
    return metrics_line.checked(event)
