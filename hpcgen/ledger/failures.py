"""How often a run was interrupted, and how often it should have saved."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from hpcgen.ledger.legs import Leg
from hpcgen.planning.storage import SaveCosts
from hpcgen.runs.history import Attempt, History
from trainer.contract.files.metrics_line import Event, number_or_none
from trainer.contract.record import record
from trainer.contract.wording import ASKED_TO_STOP

CONFIDENCE = 0.9
"""Probability with which the interval contains the mean time between failures, if failures come at random."""


@record(kw_only=True)
class Failures:
    """Interruptions of trainings, and the mean time between them in seconds."""

    count: int
    exposed_s: float
    """Time in jobs."""
    mean_s: float | None
    """None without a failure."""
    low_s: float
    high_s: float | None
    """Bounds of the mean with CONFIDENCE; without a failure there is no upper one."""


@record(kw_only=True)
class Saving:
    """The cost of saves, and how often to save. Times in seconds."""

    stall_s: float
    """Time that training stood still for a save, mean."""
    write_s: float
    """Time until a save was complete, mean."""
    restart_s: float
    """Time from an interruption to the next step, mean."""
    interval_s: float
    """Time from a start or a save to the next save, median."""
    lost: float
    """Part of the time that saves and failures cost with this interval."""
    best_interval_s: float
    """The interval that would have lost least."""
    least_lost: float


def measured_failures(legs: Sequence[Leg], exposed_s: float, *, goes_on: bool) -> Failures:
    """The interruptions in a time in jobs. The last training is not interrupted if it `goes_on`."""
    trainings = [training for leg in legs for training in leg.trainings]
    ended = trainings[:-1] if goes_on else trainings
    count = sum(map(_is_interrupted, ended))
    low, high = poisson_bounds(count)
    return Failures(
        count=count,
        exposed_s=exposed_s,
        mean_s=exposed_s / count if count else None,
        low_s=exposed_s / high,
        high_s=exposed_s / low if low else None,
    )


def measured_saving(history: History, failures: Failures, restart_s: float) -> Saving | None:
    """The cost of saves. None if the run has not saved, or was not interrupted."""
    intervals = list(_save_intervals(history))
    if not intervals or failures.mean_s is None:
        return None
    stall_s = _mean(history.checkpoints, "stall_s")
    write_s = max(_mean(history.checkpoints, "write_s"), stall_s)
    costs = SaveCosts(
        stall_s=stall_s, latency_s=write_s, restart_s=restart_s, between_failures_s=failures.mean_s
    )
    interval_s = statistics.median(intervals)
    return Saving(
        stall_s=stall_s,
        write_s=write_s,
        restart_s=restart_s,
        interval_s=interval_s,
        lost=costs.lost(interval_s),
        best_interval_s=costs.best_interval_s,
        least_lost=costs.lost(costs.best_interval_s),
    )


def _save_intervals(history: History) -> Iterator[float]:
    """Seconds from the start of an attempt, or its last save, to each save."""
    saves = [time for event in history.checkpoints if (time := number_or_none(event.get("time"))) is not None]
    starts = [training.began for training in history.attempts if training.began is not None]
    marks = sorted([(time, True) for time in saves] + [(time, False) for time in starts])
    for (before, _), (time, is_save) in itertools.pairwise(marks):
        if is_save:
            yield time - before


def poisson_bounds(count: int) -> tuple[float, float]:
    """Bounds of the expected number of events of which `count` were seen, with CONFIDENCE.

    Source: F. Garwood, "Fiducial limits for the Poisson distribution" (1936). The lower bound of none is 0.
    """
    tail = (1 - CONFIDENCE) / 2
    low = _solve(lambda mean: 1 - _at_most(count - 1, mean), tail, count) if count else 0.0
    return low, _solve(lambda mean: 1 - _at_most(count, mean), 1 - tail, count)


def _at_most(count: int, mean: float) -> float:
    """Probability of at most `count` events if `mean` are expected."""
    terms = (
        math.exp(number * math.log(mean) - mean - math.lgamma(number + 1)) for number in range(count + 1)
    )
    return math.fsum(terms)


def _solve(rising: Callable[[float], float], value: float, near: int) -> float:
    low, high = 1e-9, 10.0 * near + 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return (low + high) / 2


def _is_interrupted(training: Attempt) -> bool:
    """True unless the training ended as it was asked to, or completed its last iteration."""
    reason = training.stop_reason
    if reason is not None:
        return not reason.startswith(ASKED_TO_STOP)
    return training.last_iteration != training.start.get("train_iters")


def _mean(events: Sequence[Event], name: str) -> float:
    found = [value for event in events if (value := number_or_none(event.get(name))) is not None]
    return max(0.0, math.fsum(found) / len(found)) if found else 0.0
