"""Divides the time of one training, from the start of its process to its last line, by what the trainer recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hpcgen.ledger.parts import Part
from hpcgen.ledger.timeline import Walk
from hpcgen.runs.history import Attempt, Column, History
from trainer.contract.files.metrics_line import Event, number_or_none
from trainer.contract.files.metrics_times import PAUSES, times_of

PAUSE_PARTS = {
    "startup_s": Part.START_UP,
    "evaluation_s": Part.EVALUATION,
    "save_s": Part.SAVE,
    "recording_s": Part.START_UP,
}
"""Where the pauses between steps belong. CUDA graphs are recorded once in an attempt."""
assert PAUSE_PARTS.keys() == set(PAUSES)


@dataclass(frozen=True)
class Trainings:
    """The trainings of a run, each of which can be added to a walk."""

    history: History
    note: Event | None
    """The last step of the last attempt, if metrics.jsonl has no line for it."""
    saved_iteration: int | None
    """Steps of the last attempt after it are lost. None if they are not lost yet."""

    def add(self, training: Attempt, walk: Walk) -> Part:
        """Adds a training. Returns the part that the time after it belongs to, until something else is recorded."""
        number = self.history.attempts.index(training)
        lines = self._lines(number)
        excess_s = self._first_step_excess_s(training, lines)
        _add_start(training, walk)
        self._add_lines(training, lines, excess_s, walk)
        after = self._add_lost(number, excess_s if _is_empty(lines) else 0.0, walk)
        if training.end is not None:
            known = _parts(training.end, 0.0)
            walk.to(
                number_or_none(training.end.get("time")),
                Part.ENDING,
                self._judged(training.end, number, known),
            )
            return Part.ENDING
        return after or (Part.START_UP if _is_empty(lines) else Part.PRODUCTIVE)

    @property
    def unsaved_steps(self) -> int:
        """Steps of the last attempt that are lost, since nothing saved them."""
        if self.saved_iteration is None or not self.history.attempts:
            return 0
        last = self.history.attempts[-1]
        events = [event for event in (last.first_step, last.end, self.note) if event is not None]
        reached = [number_or_none(event.get("iteration")) or 0 for event in events]
        lines = self._lines(len(self.history.attempts) - 1)
        reached += [float(each) for each in self.history.iteration[lines][-1:]]
        return max(0, int(max(reached, default=0)) - max(self.saved_iteration, last.iteration))

    def first_step_began(self, training: Attempt) -> float | None:
        """When the first step of a training began; None if it has none."""
        if (first := training.first_step) is not None:
            return (number_or_none(first.get("time")) or 0.0) - (number_or_none(first.get("step_s")) or 0.0)
        lines = self._lines(self.history.attempts.index(training))
        if _is_empty(lines):
            return None
        columns, line = self.history.columns, lines.start
        began = columns["time"][line] - columns["step_time_s"][line] * self._weights[line]
        return float(began) if np.isfinite(began) else None

    def _lines(self, number: int) -> slice:
        """The lines of an attempt whose steps no later attempt has repeated."""
        first, last = np.searchsorted(self.history.attempt, (number, number + 1))
        return slice(int(first), int(last))

    def _add_lines(self, training: Attempt, lines: slice, excess_s: float, walk: Walk) -> None:
        if _is_empty(lines):
            return
        columns = {name: np.nan_to_num(column[lines]) for name, column in self.history.columns.items()}
        weights = self._weights[lines]
        steps_s = columns["step_time_s"] * weights
        waits_s = np.minimum(columns["data_wait_s"] * weights, steps_s)
        first_s = np.zeros(len(steps_s))
        first_s[0] = min(excess_s, steps_s[0] - waits_s[0])
        known = {Part.PRODUCTIVE: steps_s - waits_s - first_s, Part.DATA_WAIT: waits_s}
        if self.saved_iteration is not None and training is self.history.attempts[-1]:
            is_lost = self.history.iteration[lines] > self.saved_iteration
            known = {part: np.where(is_lost, 0.0, seconds) for part, seconds in known.items()}
            known[Part.REDONE] = np.where(is_lost, steps_s - first_s, 0.0)
        pauses = {name: columns[name] for name in PAUSES}
        if "phases_s" not in training.start:
            pauses |= self._inferred_pauses(columns["time"], steps_s, walk.now)
        known[Part.START_UP] = first_s
        for name, part in PAUSE_PARTS.items():
            known[part] = known.get(part, 0.0) + pauses[name]
        walk.rows(columns["time"], Part.UNACCOUNTED, known)

    def _inferred_pauses(self, times: Column, steps_s: Column, since: float) -> dict[str, Column]:
        """Pauses before the lines of a trainer of 0.2.0, which recorded the stalls of saves and the time of lines."""
        rest = np.maximum(np.diff(times, prepend=since) - steps_s, 0.0)
        stalls = [(event, number_or_none(event.get("stall_s")) or 0.0) for event in self.history.checkpoints]
        saves = np.minimum(_sums_before(times, stalls, since), rest)
        evaluations = _sums_before(times, [(event, 1.0) for event in self.history.evaluations], since)
        return {"save_s": saves, "evaluation_s": np.where(evaluations > 0, rest - saves, 0.0)}

    def _add_lost(self, number: int, excess_s: float, walk: Walk) -> Part | None:
        """Steps that the next attempt repeats, or steps of the last attempt that have no line yet."""
        attempts = self.history.attempts
        is_last = number + 1 == len(attempts)
        lost = self.note if is_last else attempts[number + 1].lost
        if not lost:
            return None
        is_known = is_last or "steps_s" in lost
        known = _parts(lost, excess_s)
        known = self._judged(lost, number, known) if is_last else _as_lost(known)
        walk.to(number_or_none(lost.get("time")), Part.UNACCOUNTED if is_known else Part.REDONE, known)
        return Part.PRODUCTIVE if is_last else Part.ENDING

    def _judged(self, line: Event, number: int, known: dict[Part, float]) -> dict[Part, float]:
        """The parts of a line without steps of its own in the history: as lost, if nothing has saved them."""
        is_lost = self.saved_iteration is not None and line["iteration"] > self.saved_iteration
        return _as_lost(known) if is_lost and number + 1 == len(self.history.attempts) else known

    def _first_step_excess_s(self, training: Attempt, lines: slice) -> float:
        """Time that the first step took longer than others, since kernels are compiled and memory is allocated."""
        typical_s = self._typical_step_s
        if typical_s is None:
            return 0.0
        if training.first_step is not None:
            return max(0.0, (number_or_none(training.first_step.get("step_s")) or 0.0) - typical_s)
        if _is_empty(lines):
            return 0.0
        seconds = np.nan_to_num(self.history.columns["step_time_s"][lines.start])
        return max(0.0, float(self._weights[lines.start] * (seconds - typical_s)))

    @cached_property
    def _weights(self) -> Column:
        return self.history.weights

    @cached_property
    def _typical_step_s(self) -> float | None:
        """Median duration of a step, without the first line of each attempt if there are others."""
        seconds = self.history.columns["step_time_s"]
        is_first = np.diff(self.history.attempt, prepend=-2) != 0
        for chosen in (seconds[~is_first], seconds):
            known = chosen[np.isfinite(chosen)]
            if len(known):
                return float(np.median(known))
        return None


def _is_empty(lines: slice) -> bool:
    return bool(lines.start == lines.stop)


def _add_start(training: Attempt, walk: Walk) -> None:
    phases = training.start.get("phases_s")
    known: dict[Part, float] = {}
    if isinstance(phases, dict) and training.start.get("checkpoint"):
        # The search for a checkpoint verifies its files.
        known[Part.RESTORE] = sum(number_or_none(phases.get(name)) or 0.0 for name in ("start", "load"))
    walk.to(training.began, Part.START_UP, known)


def _parts(line: Event, excess_s: float) -> dict[Part, float]:
    """The parts of a line, or of the sums of lost lines, whose first step took longer than others."""
    times = times_of(line)
    waits_s = min(times["data_wait_s"], times["steps_s"])
    excess_s = min(excess_s, times["steps_s"] - waits_s)
    known = {
        Part.PRODUCTIVE: times["steps_s"] - waits_s - excess_s,
        Part.DATA_WAIT: waits_s,
        Part.START_UP: excess_s,
    }
    for name, part in PAUSE_PARTS.items():
        known[part] = known.get(part, 0.0) + times[name]
    return known


def _as_lost(known: dict[Part, float]) -> dict[Part, float]:
    lost_s = known[Part.PRODUCTIVE] + known[Part.DATA_WAIT]
    return {**known, Part.PRODUCTIVE: 0.0, Part.DATA_WAIT: 0.0, Part.REDONE: lost_s}


def _sums_before(times: Column, amounts: Sequence[tuple[Event, float]], since: float) -> Column:
    """For each line, the sum of what happened since the line before it."""
    sums = np.zeros(len(times))
    for event, amount in amounts:
        time = number_or_none(event.get("time"))
        if time is not None and since < time <= times[-1]:
            sums[np.searchsorted(times, time)] += amount
    return sums
