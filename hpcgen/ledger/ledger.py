"""The ledger of a run: its time by part, GPU-hours and cost, interruptions, and what its saves cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from hpcgen.ledger.account import Account
from hpcgen.ledger.failures import Failures, Saving, measured_failures, measured_saving
from hpcgen.ledger.parts import Part
from hpcgen.ledger.timeline import Spent
from hpcgen.ledger.training import Trainings
from trainer.contract.record import record

DAY_S = 86400.0
WINDOWS = (1, 3, 7)
"""Lengths of the rolling windows in days."""


@record(kw_only=True)
class JobFacts:
    """The GPUs that the job of an attempt holds, and their cost."""

    gpus: int | None = None
    """None if it is not known."""
    price_per_gpu_hour: float | None = None
    currency: str = "USD"
    gpu_idle_limit_s: float | None = None
    """How long the site lets GPUs idle; None without a limit."""


@record(kw_only=True)
class LedgerAttempt:
    """An attempt, from the end of the one before it to its own end."""

    job: str
    """Job ID; empty for a training without a job that recorded anything."""
    restart: int
    began: float
    """When its batch script or its trainer began (Unix time in seconds)."""
    spent: Spent
    idle_s: float
    """Time in which its GPUs waited for the first step. Other parts contain it."""
    lost_steps: int
    """Steps that the next attempt repeated, or must repeat."""
    verdict: str
    status: int | None
    """As in `JobAttempt`; None without a recorded end."""
    reason: str


@record(kw_only=True)
class IdleGpus:
    """GPUs that waited for a first step for longer than the site allows."""

    job: str
    restart: int
    seconds: float
    limit_s: float


@record(kw_only=True)
class Ledger:
    """Where the time of a run went."""

    name: str
    directory: str
    began: float
    ended: float
    """End of the time (Unix time in seconds): now, if the run goes on."""
    goes_on: bool
    waits: bool
    """True if its next attempt waits in the queue; then the time ends now."""
    has_events: bool
    """False if no job of the run recorded when it waited and began, as with hpcgen 0.2.0."""
    spent: Spent
    windows: dict[str, Spent]
    """The last days before the end, by their number: windows that are shorter than the run."""
    attempts: tuple[LedgerAttempt, ...]
    lost_steps: int
    cost: float | None
    """None without a price for all GPU-hours."""
    currency: str
    idle_s: float
    """Time in which GPUs waited for a first step, of all attempts."""
    too_idle: tuple[IdleGpus, ...]
    failures: Failures
    saving: Saving | None


Facts = Mapping[tuple[str, int], JobFacts]
"""Facts of the attempts of jobs, by ID and number of restarts."""


def ledger(
    name: str,
    directory: str,
    account: Account,
    trainings: Trainings,
    facts: Facts,
    *,
    goes_on: bool,
    waits: bool,
    since: float = 0.0,
) -> Ledger:
    """The ledger of a run for the time after `since` (Unix time in seconds)."""
    timeline = account.timeline
    began, ended = max(timeline.began, since), timeline.ends
    spent = timeline.spent(began)
    attempts = tuple(_attempts(account, trainings, began))
    legs = account.legs[len(account.legs) - len(attempts) :]
    failures = measured_failures(legs, spent.in_jobs_s, goes_on=goes_on)
    of_attempts = [facts_of(attempt, facts) for attempt in attempts]
    costs = [_cost(attempt, known) for attempt, known in zip(attempts, of_attempts, strict=True)]
    return Ledger(
        name=name,
        directory=directory,
        began=began,
        ended=ended,
        goes_on=goes_on,
        waits=waits,
        has_events=any(leg.job is not None for leg in account.legs),
        spent=spent,
        windows={
            str(days): timeline.spent(ended - days * DAY_S)
            for days in WINDOWS
            if ended - days * DAY_S > began
        },
        attempts=attempts,
        lost_steps=sum(attempt.lost_steps for attempt in attempts),
        cost=sum(cost for cost in costs if cost is not None) if costs and None not in costs else None,
        currency=next((known.currency for known in reversed(of_attempts)), JobFacts().currency),
        idle_s=sum(attempt.idle_s for attempt in attempts),
        too_idle=tuple(_too_idle(attempts, facts)),
        failures=failures,
        saving=measured_saving(trainings.history, failures, _restart_s(spent, len(attempts))),
    )


def facts_of(attempt: LedgerAttempt, facts: Facts) -> JobFacts:
    """The facts of the job of an attempt. Default: nothing is known."""
    return facts.get((attempt.job, attempt.restart), JobFacts())


def _attempts(account: Account, trainings: Trainings, since: float) -> Iterator[LedgerAttempt]:
    lost = _lost_steps(trainings)
    for number, leg in enumerate(account.legs):
        spent = account.timeline.of(number).spent(since)
        if spent.wall_s > 0:
            yield LedgerAttempt(
                job=leg.job.job if leg.job is not None else str(leg.trainings[0].start.get("job") or ""),
                restart=leg.job.restart if leg.job is not None else 0,
                began=leg.began,
                spent=spent,
                idle_s=sum(idle.seconds for idle in account.idle if idle.leg == number),
                lost_steps=sum(lost[id(training)] for training in leg.trainings),
                verdict=(leg.job.verdict or "") if leg.job is not None else "",
                status=leg.job.status if leg.job is not None else None,
                reason=leg.job.reason if leg.job is not None else "",
            )


def _lost_steps(trainings: Trainings) -> dict[int, int]:
    """Number of steps of each training that the next one repeated or must repeat, by the identity of the training."""
    attempts = trainings.history.attempts
    lost = dict.fromkeys(map(id, attempts), 0)
    for training, after in itertools.pairwise(attempts):
        if after.lost_iteration is not None:
            lost[id(training)] = max(0, after.lost_iteration - after.iteration)
    if attempts:
        lost[id(attempts[-1])] = trainings.unsaved_steps
    return lost


def _restart_s(spent: Spent, num_attempts: int) -> float:
    """Mean time from the end of the steps of an attempt to the first step of the next one."""
    parts = (Part.START_UP, Part.RESTORE, Part.INFRASTRUCTURE, Part.ENDING)
    return sum(spent.parts[part.value] for part in parts) / max(1, num_attempts)


def _cost(attempt: LedgerAttempt, facts: JobFacts) -> float | None:
    if facts.price_per_gpu_hour is None:
        return None
    return attempt.spent.gpu_hours * facts.price_per_gpu_hour


def _too_idle(attempts: Sequence[LedgerAttempt], facts: Facts) -> Iterator[IdleGpus]:
    for attempt in attempts:
        limit_s = facts_of(attempt, facts).gpu_idle_limit_s
        if limit_s is not None and attempt.idle_s > limit_s:
            yield IdleGpus(job=attempt.job, restart=attempt.restart, seconds=attempt.idle_s, limit_s=limit_s)
