"""Divides the time of a run into parts: what its jobs recorded, and inside of them what the trainer recorded.

Times come from three clocks: the node of the batch script, the node of rank 0, and Slurm's controller, which knows
seconds. So a later record never begins before an earlier one has ended (`Walk`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcgen.ledger.legs import Leg, ends_of, legs_of, process_began
from hpcgen.ledger.parts import Part
from hpcgen.ledger.timeline import Timeline, Walk
from hpcgen.ledger.training import Trainings
from hpcgen.runs.attempts import JobAttempt
from hpcgen.runs.history import Attempt

LAUNCH = "launch"
RANKS_ENDED = "restart_in_job"
"""Events of a job between its start and its end."""
STARTS = (RANKS_ENDED, "spare", LAUNCH)
"""Events of a job that starts its ranks."""


@dataclass(frozen=True, kw_only=True)
class Idle:
    """A time in which a job held its devices before a first step."""

    leg: int
    began: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Account:
    """The time of a run from its first submission on."""

    timeline: Timeline
    legs: tuple[Leg, ...]
    idle: tuple[Idle, ...]


def account(
    trainings: Trainings,
    jobs: Sequence[JobAttempt],
    *,
    now: float | None,
    waits_until: float | None = None,
    gpus: Mapping[tuple[str, int], int] | None = None,
    accounted: Mapping[str, float] | None = None,
) -> Account | None:
    """Divides the time of a run; None if it has not begun.

    Args:
        trainings: what the trainer recorded.
        jobs: attempts of the jobs that train.
        now: end of the time if the run goes on; None if it does not.
        waits_until: end of the time if its next attempt waits in the queue. It counts for the last attempt.
        gpus: GPUs that the attempts of jobs hold, by ID and number of restarts.
        accounted: when jobs ended that recorded no end themselves, by ID.
    """
    legs = legs_of(trainings.history.attempts, jobs)
    if not legs:
        return None
    first = legs[0].job.queued_since if legs[0].job is not None else None
    walk = Walk(legs[0].began if first is None else min(first, legs[0].began))
    idle: list[Idle] = []
    for number, (leg, ended) in enumerate(zip(legs, ends_of(legs, accounted or {}), strict=True)):
        walk.leg, walk.gpus = number, None
        _add_gap(leg, walk)
        walk.gpus = _num_gpus(leg, gpus or {})
        part = _add_leg(leg, trainings, walk, idle)
        if number + 1 == len(legs) and ended is None:
            ended = now
        walk.to(ended, part)
        _close(idle, walk)
    walk.gpus = None
    walk.to(waits_until, Part.QUEUE)
    return Account(timeline=walk.timeline(), legs=legs, idle=tuple(idle))


def _add_gap(leg: Leg, walk: Walk) -> None:
    """The time before a leg: nobody has submitted a job, it is held back, or it waits for nodes."""
    job = leg.job
    if job is None:
        walk.to(leg.began, Part.IDLE)
        return
    is_requeued = job.restart > 0
    if job.queued_since is not None:
        walk.to(min(job.queued_since, job.began), Part.IDLE)
        eligible = min(job.eligible_since or job.began, job.began)
        walk.to(eligible, Part.INFRASTRUCTURE if is_requeued else Part.QUEUE)
    walk.to(job.began, Part.QUEUE if is_requeued or job.queued_since is not None else Part.IDLE)


def _add_leg(leg: Leg, trainings: Trainings, walk: Walk, idle: list[Idle]) -> Part:
    """The preparation, launches and trainings of a leg. Returns the part that the time after them belongs to."""
    marks = _marks(leg)
    part = Part.INFRASTRUCTURE if any(mark == LAUNCH for _, mark in marks) else Part.START_UP
    idle.append(Idle(leg=walk.leg, began=walk.now, seconds=-1.0))
    for time, mark in marks:
        if mark == RANKS_ENDED:
            walk.to(time, part)
            part = Part.INFRASTRUCTURE
        elif isinstance(mark, str):
            # After a training, the nodes are checked, and spare ones take over.
            walk.to(time, part if part is Part.START_UP else Part.INFRASTRUCTURE)
            part = Part.START_UP
        else:
            walk.to(time, Part.START_UP)
            if idle[-1].seconds >= 0:
                idle.append(Idle(leg=walk.leg, began=walk.now, seconds=-1.0))
            part = trainings.add(mark, walk)
            if (began := trainings.first_step_began(mark)) is not None:
                idle[-1] = _until(idle[-1], began)
    return part


def _marks(leg: Leg) -> list[tuple[float, str | Attempt]]:
    """Moments that divide the time of a leg, in order: launches of ranks, ends of ranks that start again, trainings."""
    events = leg.job.events if leg.job is not None else ()
    marks: list[tuple[float, str | Attempt]] = [
        (event["time"], event["event"]) for event in events if event["event"] in (LAUNCH, RANKS_ENDED)
    ]
    marks += [(process_began(training), training) for training in leg.trainings]
    return sorted(marks, key=lambda mark: mark[0])


def _close(idle: list[Idle], walk: Walk) -> None:
    """The leg has ended. If it had no step, its devices were idle all the time."""
    if idle[-1].seconds < 0:
        idle[-1] = _until(idle[-1], walk.now)


def _until(idle: Idle, time: float) -> Idle:
    return Idle(leg=idle.leg, began=idle.began, seconds=max(0.0, time - idle.began))


def _num_gpus(leg: Leg, gpus: Mapping[tuple[str, int], int]) -> int:
    """GPUs of a leg. If its job does not tell how many it holds, those that train."""
    if leg.job is not None and (found := gpus.get((leg.job.job, leg.job.restart))) is not None:
        return found
    start = leg.trainings[-1].start if leg.trainings else {}
    size = start.get("world_size")
    return size if start.get("device") == "cuda" and isinstance(size, int) else 0
