"""Joins the attempts of jobs with the trainings in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpcgen.runs.attempts import JobAttempt
from hpcgen.runs.history import Attempt
from trainer.contract.files.metrics_line import number_or_none


@dataclass(frozen=True)
class Leg:
    """An attempt of a job with its trainings, or a training without a job that recorded anything."""

    job: JobAttempt | None
    trainings: list[Attempt] = field(default_factory=list)

    @property
    def began(self) -> float:
        """When the batch script or the trainer began (Unix time in seconds)."""
        return self.job.began if self.job is not None else process_began(self.trainings[0])


def legs_of(trainings: Sequence[Attempt], jobs: Sequence[JobAttempt]) -> tuple[Leg, ...]:
    """The legs of a run in the order in which they began."""
    legs = [Leg(job) for job in jobs]
    for training in trainings:
        leg = _leg_of(training, legs)
        if leg is None:
            leg = Leg(None)
            legs.append(leg)
        leg.trainings.append(training)
    return tuple(sorted(legs, key=lambda leg: leg.began))


def process_began(training: Attempt) -> float:
    """When rank 0 began, or its first line with a trainer of 0.2.0."""
    return number_or_none(training.start.get("process_began")) or training.began or 0.0


def ends_of(legs: Sequence[Leg], accounted: Mapping[str, float]) -> Iterator[float | None]:
    """The end of the job of each leg; None if nothing tells it. `accounted` has those that Slurm knows, by job ID."""
    for leg, after in zip(legs, (*legs[1:], None), strict=True):
        next_job = after.job if after is not None else None
        if leg.job is None or leg.job.ended is not None:
            yield leg.job.ended if leg.job is not None else None
        elif next_job is not None and next_job.job == leg.job.job:
            yield next_job.queued_since  # Slurm ended it and put it back into the queue
        else:
            yield accounted.get(leg.job.job)


def _leg_of(training: Attempt, legs: Sequence[Leg]) -> Leg | None:
    """The leg of the job that this training names, or around this training if it names none."""
    job, restart = training.start.get("job"), training.start.get("restart")
    for leg in legs:
        if leg.job is not None and (leg.job.job, leg.job.restart) == (job, restart):
            return leg
    if job:
        return None
    began = process_began(training)
    around = [leg for leg in legs if leg.job is not None and leg.job.began <= began <= _latest_end(leg.job)]
    return around[-1] if around else None


def _latest_end(job: JobAttempt) -> float:
    return math.inf if job.ended is None else job.ended
