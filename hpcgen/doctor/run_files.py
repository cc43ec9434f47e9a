"""The files of a run that its causes are read from. Others may write into a shared run, so nothing here trusts them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcgen.checkpoints.run_config import read_run_config, read_trained_config
from hpcgen.config.stages import has_attempts
from hpcgen.errors import HpcgenError
from hpcgen.logs.failure import Failure
from hpcgen.redaction import redact
from hpcgen.report.run import Run, read_run
from hpcgen.runs.attempts import JobAttempt, read_attempts
from hpcgen.runs.failures import root_failure
from hpcgen.runs.files import RunFiles as FilesOfStatus
from hpcgen.runs.files import RunReader, users_of
from hpcgen.runs.secrets import secrets_of
from hpcgen.runs.slurm import Accounts, Queue, ask_accounts, ask_queue
from hpcgen.runs.state import RunState
from hpcgen.runs.status import status_of, unsettled_jobs
from hpcgen.slurm.job_files import RUNNING
from trainer.contract.config import TrainerConfig, from_dict
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import TrainerError
from trainer.contract.files.regular_file import open_regular
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.files.shared_files import foreign_link
from trainer.contract.record import record, replaced

MARKERS = (RunDirectory.DONE, RunDirectory.STOPPED, RunDirectory.FAILED, RUNNING)
MOST_BYTES = 1 << 20
"""Size of the part of a small file that is read. Others may have made it larger."""


@record(kw_only=True)
class RunFiles:
    """The files that a run left in its directory."""

    directory: Path
    checkpoints: Path
    attempts: tuple[JobAttempt, ...]
    """Attempts of all jobs in the order in which they began."""
    run: Run | None
    """Metrics, configuration and state. None before the first step, or if they cannot be read."""
    no_run: str
    """Why `run` is None."""
    markers: Mapping[str, str]
    """Name -> text of the marker files that exist and can be read."""
    job_config: Path | None
    """The newest job's trainer.json."""
    trainer: TrainerConfig | None
    """Configuration of the newest job. None if there is none, or if this version does not know it."""
    trained: TrainerConfig | None
    """Configuration of the newest attempt that trained, likewise."""
    failure: Failure | None
    """Root failure of the last attempt, from its logs. None if it has none, runs, or left no log."""
    now: float
    state: RunState | None
    """As `hpcgen status` says, or without Slurm's answer as the files say. None if they do not."""
    is_active: bool | None = None
    """True if Slurm has the job of the last attempt, waiting or running. None if that is unknown."""
    slurm_says: str = ""
    """The answer of Slurm about that job; "" if it was not asked."""

    @property
    def last(self) -> JobAttempt | None:
        """The attempt whose end counts."""
        return _last(self.attempts)

    @property
    def is_own(self) -> bool:
        """True if this user owns the run. Jobs of another owner may be able to read what this user cannot."""
        return self.directory.stat().st_uid == os.geteuid()

    @property
    def run_directory(self) -> RunDirectory:
        """The run directory, with the trainer's names of its files."""
        return RunDirectory.at(self.directory, save=str(self.checkpoints))


def read_run_files(directory: Path, now: float) -> RunFiles:
    """Reads a run directory at the time `now` (Unix time in seconds).

    Raises:
        HpcgenError: there is no such directory, or it cannot be read.
    """
    if not directory.exists():
        raise HpcgenError("no such directory", "give the directory of a run (paths.run_dir)", where=directory)
    if not directory.is_dir():
        raise HpcgenError(
            "is not a directory", "give the directory of a run (paths.run_dir)", where=directory
        )
    attempts: tuple[JobAttempt, ...] = ()
    with contextlib.suppress(OSError):  # unread_records tells why
        attempts = read_attempts(directory)
    try:
        config, job_config = read_run_config(directory)
    except OSError as error:
        raise HpcgenError(f"cannot read {error.filename or directory}: {error.strerror}") from error
    run, no_run = _read_run(directory, now)
    return RunFiles(
        directory=directory,
        checkpoints=RunDirectory.recorded(directory, config).checkpoints,
        attempts=attempts,
        run=run,
        no_run=no_run,
        markers={name: text for name in MARKERS if (text := _marker(directory, name)) is not None},
        job_config=job_config,
        trainer=_resolved(config),
        trained=_resolved(read_trained_config(directory)),
        failure=_failure(directory, attempts),
        now=now,
        state=run.state if run else None,
    )


def _last(attempts: Sequence[JobAttempt]) -> JobAttempt | None:
    """The latest attempt of a stage that trains; without one, the latest of any stage."""
    trains = [attempt for attempt in attempts if has_attempts(attempt.stage)]
    return next(reversed(trains or list(attempts)), None)


def _failure(directory: Path, attempts: Sequence[JobAttempt]) -> Failure | None:
    last = _last(attempts)
    with contextlib.suppress(OSError):
        return root_failure(directory, last) if last else None
    return None


def with_slurm(files: RunFiles) -> RunFiles:
    """Copy of these files with Slurm's answer: the state, and what became of a last attempt without an end."""
    queue = ask_queue(users_of(files.directory))
    run = RunReader(files.directory, counts_outputs=False).read(files.now)
    return with_answer(files, run, queue, ask_accounts(unsettled_jobs([run], queue)))


def with_answer(files: RunFiles, run: FilesOfStatus, queue: Queue, accounts: Accounts) -> RunFiles:
    """Copy of these files with an answer of Slurm. `run` is what `hpcgen status` reads."""
    status = status_of(run, queue, accounts, files.now)
    files = replaced(files, state=status.state)
    last = files.last
    if last is None or last.ended is not None:
        return files
    job = queue.find(last.job)
    says = f"squeue: job {job.job} {job.in_words()}" if job is not None and not job.is_over else ""
    key = (last.job, last.restart)
    if any((each.job, each.restart) == key and each.state == "running" for each in status.attempts):
        return replaced(
            files, is_active=True, slurm_says=says, failure=None
        )  # it survived what its log shows
    if says or queue.problem:
        return replaced(files, is_active=True if says else None, slurm_says=says or queue.problem)
    accounted = accounts.jobs.get(last.job)
    state = accounted.state if accounted else job.state if job else ""
    says = f"job {last.job} is {state}" if state else f"job {last.job} is not in the queue"
    return replaced(files, is_active=False, slurm_says=f"Slurm: {says}")


def _read_run(directory: Path, now: float) -> tuple[Run | None, str]:
    if foreign_link(directory / RunDirectory.METRICS, directory) is not None:
        return None, f"{RunDirectory.METRICS} is a link of another user"
    try:
        return read_run(directory, now), ""
    except HpcgenError as error:
        return None, error.mistakes[0].reason


def _marker(directory: Path, name: str) -> str | None:
    if foreign_link(directory / name, directory) is not None:
        return None
    with contextlib.suppress(OSError):
        return redact(read_start(directory / name), secrets_of(directory))
    return None


def read_start(path: Path) -> str:
    """The text of a file, of a large one its beginning.

    Raises:
        OSError: it is not a regular file, or cannot be read.
    """
    with open_regular(path) as file:
        return file.read(MOST_BYTES).decode(errors="replace")


def _resolved(config: Mapping[str, Any]) -> TrainerConfig | None:
    """The trainer's configuration, if this version knows all its keys and values."""
    try:
        return resolve(from_dict(TrainerConfig, dict(config), where="trainer.json"))
    except (TrainerError, ValueError, TypeError, LookupError, RecursionError, ArithmeticError, OSError):
        return None
