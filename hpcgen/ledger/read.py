"""Reads the ledger of a run from its directory. Asks Slurm only for the ends of jobs that recorded none."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcgen.config.stages import MACHINE_FILE, STAGE_ROWS
from hpcgen.errors import HpcgenError
from hpcgen.ledger.account import STARTS, account
from hpcgen.ledger.ledger import JobFacts, Ledger, ledger
from hpcgen.ledger.training import Trainings
from hpcgen.runs.attempts import JobAttempt, read_attempts
from hpcgen.runs.history import NO_HISTORY, History, read_history
from hpcgen.runs.latest import Tail
from hpcgen.runs.node_lists import node_names
from hpcgen.runs.slurm import Accounts, Queue, ask_accounts
from hpcgen.runs.state import SILENT_S, state_of
from hpcgen.slurm.job_files import SLURM_JOB, job_directory
from trainer.contract.files.metrics_line import Event, number_or_none
from trainer.contract.files.metrics_times import read_note
from trainer.contract.files.regular_file import open_regular
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.files.shared_files import foreign_link

_MOST_BYTES = 1 << 16
"""The file with the nodes of a job has a few lines. Others may be able to write a larger one."""
_MOST_GPUS = 1 << 20


def read_ledger(
    directory: Path,
    now: float,
    since: float = 0.0,
    price: JobFacts | None = None,
    queue: Callable[[Path], Queue] | None = None,
    accounts: Accounts | None = None,
) -> Ledger:
    """The ledger of a run at the time `now`, for the time after `since` (Unix times in seconds).

    `price` is that of jobs whose scripts recorded none. `queue` asks Slurm for the jobs of the run's owner, if the
    last one was requeued. Default: they are not asked for. `accounts` is Slurm's answer about the `open_jobs` of this
    run and others. Default: it is asked.

    Raises:
        HpcgenError: the directory is not one of a run, cannot be read, or the run has not begun.
    """
    try:
        history = _read_history(directory)
        jobs = training_jobs(directory)
    except OSError as error:
        raise HpcgenError(f"cannot read {error.filename or directory}: {error.strerror}") from error
    waits = False
    if queue is not None and jobs and jobs[-1].verdict == "requeued":
        waits = any(job.waits and _trains(job.stage) for job in queue(directory).of_run(directory))
    accounts = accounts or ask_accounts(_without_end(jobs))
    return ledger_of(directory, history, jobs, now, since, price, _ends(jobs, accounts), waits=waits)


def open_jobs(directory: Path) -> list[str]:
    """IDs of the jobs that train in a run directory and recorded no end. None if it cannot be read."""
    with contextlib.suppress(OSError):
        return _without_end(training_jobs(directory))
    return []


def ledger_of(
    directory: Path,
    history: History,
    jobs: Sequence[JobAttempt],
    now: float,
    since: float = 0.0,
    price: JobFacts | None = None,
    accounted: Mapping[str, float] | None = None,
    *,
    waits: bool = False,
) -> Ledger:
    """The ledger of a run whose history and jobs are read already.

    `accounted`: when jobs ended, as Slurm knows. `waits`: whether the next attempt waits in the queue.

    Raises:
        HpcgenError: the run has not begun.
    """
    latest = Tail(directory / RunDirectory.METRICS).read()
    state, _ = state_of(directory, latest, now)
    is_over = bool(jobs) and jobs[-1].job in (accounted or {})
    if state == "died" and not is_over and _starts_again(jobs, latest.last_time or 0.0, now):
        state = "running"
    goes_on = state == "running"
    facts = {(job.job, job.restart): _facts(directory, job, price or JobFacts()) for job in jobs}
    saved = max((event["iteration"] for event in history.checkpoints), default=0)
    trainings = Trainings(
        history=history,
        note=_note(directory, history),
        saved_iteration=saved if state in ("died", "failed", "hung") else None,
    )
    found = account(
        trainings,
        jobs,
        now=now if goes_on else None,
        waits_until=now if waits else None,
        gpus={key: known.gpus for key, known in facts.items() if known.gpus is not None},
        accounted=accounted,
    )
    if found is None:
        hint = "the run has not started yet, or this is not the directory of a training run (paths.run_dir)"
        raise HpcgenError("no attempt to account for", hint, where=directory)
    name = str(history.start.get("name") or directory.absolute().name)
    return ledger(name, str(directory), found, trainings, facts, goes_on=goes_on, waits=waits, since=since)


def _starts_again(jobs: Sequence[JobAttempt], last_time: float, now: float) -> bool:
    """True if the ranks have ended, and their job is just starting them again."""
    if not jobs or jobs[-1].ended is not None:
        return False
    event = jobs[-1].events[-1]
    began = event["time"]
    return event["event"] in STARTS and last_time <= began and now - began < SILENT_S


def _read_history(directory: Path) -> History:
    if not directory.is_dir():
        problem = "is a file" if directory.exists() else "no such directory"
        raise HpcgenError(
            problem, "give the directory of a run (paths.run_dir), or its run file", where=directory
        )
    metrics = directory / RunDirectory.METRICS
    return read_history(metrics, needs_step=False) if metrics.exists() else NO_HISTORY


def training_jobs(directory: Path) -> tuple[JobAttempt, ...]:
    """The attempts of the jobs that train, in the order in which they began.

    Raises:
        OSError: a directory cannot be read.
    """
    return tuple(job for job in read_attempts(directory) if _trains(job.stage))


def _trains(stage: str | None) -> bool:
    row = STAGE_ROWS.get(stage or "")
    return row is not None and row.trains


def _note(directory: Path, history: History) -> Event | None:
    """The last step of the last attempt, if no line has it."""
    path = directory / RunDirectory.LAST_STEP
    if not history.attempts or foreign_link(path, directory) is not None:
        return None
    note, last_time = read_note(path), history.attempts[-1].last_time
    return note if note is not None and note["time"] > (last_time or 0.0) else None


def _without_end(jobs: Sequence[JobAttempt]) -> list[str]:
    last = {job.job: job for job in jobs}
    return [name for name, job in last.items() if job.ended is None and SLURM_JOB.fullmatch(name)]


def _ends(jobs: Sequence[JobAttempt], accounts: Accounts) -> dict[str, float]:
    """When jobs ended that recorded no end, as far as Slurm's accounting knows."""
    known = {name: accounts.jobs.get(name) for name in _without_end(jobs)}
    return {name: job.ended for name, job in known.items() if job is not None and job.ended is not None}


def _facts(directory: Path, job: JobAttempt, price: JobFacts) -> JobFacts:
    """The record of a job about its nodes, and their price."""
    found = _machine(directory, job)
    per_node, own_price = (
        number_or_none(found.get("gpus_per_node")),
        number_or_none(found.get("price_per_gpu_hour")),
    )
    gpus = None if per_node is None else round(per_node) * len(node_names(job.nodes))
    currency = found.get("currency")
    return JobFacts(
        gpus=gpus if gpus is not None and 0 < gpus <= _MOST_GPUS else None,
        price_per_gpu_hour=price.price_per_gpu_hour if own_price is None else own_price,
        currency=currency if own_price is not None and isinstance(currency, str) else price.currency,
        gpu_idle_limit_s=number_or_none(found.get("gpu_idle_limit_s")) or price.gpu_idle_limit_s,
    )


def _machine(directory: Path, job: JobAttempt) -> dict[str, Any]:
    path = job_directory(directory, job.job) / MACHINE_FILE
    if "/" in job.job or foreign_link(path, directory) is not None:
        return {}
    try:
        with open_regular(path) as file:
            found = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
