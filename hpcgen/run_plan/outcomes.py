"""The outcomes of trials: measured against predicted, and which layout is the fastest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcgen.run_plan.trials import Candidate
from hpcgen.text import harmless, padded
from trainer.contract.record import record
from trainer.contract.trials import TrialResult

NOTICEABLE = 0.01
"""Smallest gain for which another layout is worth a change. Steps of one layout differ by as much between jobs."""


@record(kw_only=True)
class Outcome:
    """A candidate, and its result if it has one."""

    candidate: Candidate
    result: TrialResult | None

    @property
    def name(self) -> str:
        """The layout."""
        return self.candidate.trial.name

    @property
    def is_own(self) -> bool:
        """True for the layout of the run itself."""
        return not self.candidate.trial.overrides

    @property
    def step_s(self) -> float | None:
        """Measured seconds of a step."""
        return self.result.step_s if self.result else None


@record
class Outcomes:
    """The outcomes of all trials: the fastest first, then those without a measurement."""

    all: tuple[Outcome, ...]

    @classmethod
    def of(cls, candidates: Sequence[Candidate], results: Mapping[str, TrialResult]) -> Outcomes:
        """The outcomes of candidates, with results by the key of their trial."""
        made = [Outcome(candidate=each, result=results.get(each.trial.key)) for each in candidates]
        return cls(tuple(sorted(made, key=lambda each: each.step_s or float("inf"))))

    @property
    def missing(self) -> list[Outcome]:
        """Outcomes without a result."""
        return [each for each in self.all if each.result is None]

    @property
    def fastest(self) -> Outcome | None:
        """The fastest measured layout. None if none was measured."""
        return self.all[0] if self.all and self.all[0].step_s is not None else None

    @property
    def own(self) -> Outcome:
        """The run itself."""
        return next(each for each in self.all if each.is_own)

    @property
    def predicted(self) -> Outcome | None:
        """The measured layout with the fastest prediction. None without predictions."""
        measured = [each for each in self.all if each.step_s and each.candidate.step_s]
        return min(measured, key=lambda each: each.candidate.step_s or 0.0, default=None)

    @property
    def better(self) -> Outcome | None:
        """The fastest layout, if it is noticeably faster than the run's own, or if that was not measured."""
        best, own_s = self.fastest, self.own.step_s
        if best is None or best.is_own or best.step_s is None:
            return None
        return best if own_s is None or own_s / best.step_s - 1 >= NOTICEABLE else None


def conclusions(outcomes: Outcomes) -> Iterator[str]:
    """Yields what the measurements mean, in sentences."""
    best, own, predicted = outcomes.fastest, outcomes.own, outcomes.predicted
    if best is None or best.step_s is None:
        return
    if best.is_own:
        yield f"the run's own layout, {best.name}, is the fastest"
    else:
        yield f"{best.name} is the fastest{_compared(best, own)}"
    if predicted is None or predicted.step_s is None:
        return
    if predicted is not best:
        slower = predicted.step_s / best.step_s - 1
        yield f"{predicted.name} was predicted to be the fastest; it is {slower:.1%} slower"
    yield f"predicted times are {_errors(outcomes)}"


def _errors(outcomes: Outcomes) -> str:
    """The largest differences of predicted times from measured ones."""
    errors = [
        each.candidate.step_s / each.step_s - 1
        for each in outcomes.all
        if each.candidate.step_s is not None and each.step_s is not None
    ]
    lowest, highest = min(errors), max(errors)
    ends = (f"{abs(error):.1%} too {'short' if error < 0 else 'long'}" for error in (lowest, highest))
    return " to ".join(dict.fromkeys(ends))


def reason(best: Outcome, own: Outcome) -> str:
    """Why the run file has this layout, for a comment in it."""
    return f"hpcgen tune: {best.step_s:.4g} s per step measured{_compared(best, own)}"


def _compared(best: Outcome, own: Outcome) -> str:
    if best.step_s is None or own.step_s is None:
        return f". The run's own layout, {own.name}, was not measured"
    return f", {own.step_s / best.step_s - 1:.1%} faster than the run's {own.name}"


def table(outcomes: Outcomes) -> Iterator[str]:
    """Yields the lines of a table. A line below tells why a layout was not measured."""
    heading = ("", "layout", "measured", "predicted", "tokens/s", "GiB in use")
    rows = [heading, *map(_cells, outcomes.all)]
    figures = range(2, len(heading))
    for cells, outcome in zip(padded(rows, right=figures), (None, *outcomes.all), strict=True):
        yield "  ".join(cells).rstrip()
        if outcome is not None and outcome.result is not None and outcome.result.reason:
            yield f"   {outcome.result.status}: {harmless(outcome.result.reason)}"
    yield "* the run's own layout"


def _cells(outcome: Outcome) -> tuple[str, ...]:
    result, candidate = outcome.result, outcome.candidate
    measured: str = "not yet" if result is None else result.status
    predicted = "-" if candidate.step_s is None else f"{candidate.step_s:.4g} s"
    if result is not None and result.step_s is not None:
        measured = f"{result.step_s:.4g} s"
        predicted += f" ({candidate.step_s / result.step_s - 1:+.1%})" if candidate.step_s else ""
    speed = result.tokens_per_s if result else None
    return (
        "*" if outcome.is_own else "",
        outcome.name,
        measured,
        predicted,
        "-" if speed is None else f"{speed:,.0f}",
        _memory(candidate, result),
    )


def _memory(candidate: Candidate, result: TrialResult | None) -> str:
    if result is None:
        return "-" if candidate.memory_gib is None else f"about {candidate.memory_gib:.1f}"
    if result.in_use_gib is None:
        return "-"
    of = "" if result.device_gib is None else f" of {result.device_gib:.1f}"
    return f"{result.in_use_gib:.1f}{of}"


def in_json(outcomes: Outcomes) -> list[dict[str, Any]]:
    """The outcomes as plain data."""
    return [
        {
            "name": each.name,
            "overrides": list(each.candidate.trial.overrides),
            "is_own": each.is_own,
            "predicted_step_s": each.candidate.step_s,
            "estimated_gib": each.candidate.memory_gib,
            "result": each.result and dataclasses.asdict(each.result),
        }
        for each in outcomes.all
    ]
