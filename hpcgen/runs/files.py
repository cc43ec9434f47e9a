"""Facts about a run from its directory, without asking Slurm. Reads small files, and the end of larger ones."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcgen.checkpoints.run_config import read_trained_config
from hpcgen.config.stages import STAGE_ROWS
from hpcgen.data.concurrent_map import concurrent_map
from hpcgen.errors import HpcgenError
from hpcgen.redaction import redact
from hpcgen.runs.attempts import Event, JobAttempt, read_end, read_job
from hpcgen.runs.latest import NOTHING, Latest, Tail
from hpcgen.runs.program import ProgramProgress, program_progress
from hpcgen.runs.secrets import secrets_of
from hpcgen.runs.state import State, process_is_gone, state_of
from hpcgen.runs.unread import unread_records
from hpcgen.slurm.job_files import ARRAY_TASK, EXCLUDED, JOBS, job_directory
from trainer.contract.files import checkpoint_files
from trainer.contract.files.regular_file import read_text
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.files.shared_files import foreign_link, user
from trainer.contract.record import record

if TYPE_CHECKING:
    from hpcgen.data.status import StageStatus

PROGRAM = next(name for name, row in STAGE_ROWS.items() if row.runs_user_program)
_EXCLUDED = re.compile(r"([A-Za-z0-9._-]+) ([0-9]{1,12})\b")
MOST_REASONS = 3
COUNTED_S = 15.0
"""Seconds for which the count of the data stages' outputs is used: it takes a second for ten thousand."""


@record(kw_only=True)
class SavedCheckpoints:
    """The checkpoints of a run, judged by the names of their files. `hpcgen checkpoint list` looks into them."""

    directory: str
    newest: int | None
    """Iteration of the newest complete checkpoint."""
    saved: float | None
    """When it was complete (Unix time in seconds)."""
    complete: int
    """Number of complete checkpoints."""
    saving: int | None
    """Iteration of a newer one that is not complete: a save in progress, or one that was interrupted."""


@record(kw_only=True)
class Disk:
    """The file system of a directory. Quotas are not considered."""

    free: int
    """Bytes that the user can still write."""
    total: int


@record(kw_only=True)
class ArrayFiles:
    """The records of the tasks of an array."""

    job: str
    stage: str
    began: float
    """When its first task began (Unix time in seconds)."""
    active: float
    """When its last task ended, or `began`."""
    ended: dict[str, int]
    """Number of tasks with each verdict."""
    open: tuple[str, ...]
    """Tasks without an end: they run, or were killed."""
    reasons: tuple[str, ...]
    """Why tasks failed, of MOST_REASONS tasks."""


@record(kw_only=True)
class RunFiles:
    """The contents of a run directory, without an answer of Slurm."""

    directory: Path
    name: str
    owner: int
    """User ID of the directory's owner."""
    is_own: bool
    """True if this user is the owner, or root: Slurm shows all jobs of the run."""
    latest: Latest
    state: State | None
    """State that markers, hang reports and signs of activity show; None without any."""
    word: str
    """Reason for the state, or the last sign of activity."""
    secrets: tuple[str, ...]
    """Values that reasons may not show."""
    config: dict[str, Any]
    """Configuration of the trainer, as it last trained; empty if there is none."""
    attempts: tuple[JobAttempt, ...]
    """Attempts of jobs that are no array, in the order in which they began."""
    gone: tuple[str, ...]
    """Jobs of this machine without an end whose processes are gone."""
    program: ProgramProgress | None
    """Progress of the last attempt of a program of the user."""
    arrays: tuple[ArrayFiles, ...]
    """The newest array of each data stage."""
    data: tuple[StageStatus, ...]
    """Data stages that jobs of this run have worked on."""
    data_problem: str
    """Why `data` is empty although such jobs have run; otherwise empty."""
    checkpoints: SavedCheckpoints | None
    excluded: dict[str, float]
    """Nodes that jobs avoid, and until when."""
    disk: Disk | None
    unread: tuple[str, ...]
    """Files that could not be read, and why."""

    @functools.cached_property
    def paths(self) -> tuple[Path, Path]:
        """The directory's paths that Slurm may name."""
        return self.directory.absolute(), self.directory.resolve()


class RunReader:
    """Reads the directory of a run, also several times: then only what may have changed."""

    def __init__(self, directory: Path, *, counts_outputs: bool = True, may_be_absent: bool = False) -> None:
        """Without `counts_outputs`, `data` stays empty. It needs a look at each output of the data stages.
        `may_be_absent`: the first job makes the directory.
        """
        self._directory = directory
        self._counts_outputs = counts_outputs
        self._may_be_absent = may_be_absent
        self._tail = Tail(directory / RunDirectory.METRICS)
        self._data: tuple[tuple[StageStatus, ...], str] = ((), "")
        self._counted = -math.inf
        """When `_data` was counted."""
        self._ended: dict[str, Event] = {}
        """Tasks of arrays that ended, by name."""

    def read(self, now: float) -> RunFiles:
        """Reads the directory at the time `now` (Unix time in seconds).

        Raises:
            HpcgenError: it is not a directory, or the user may not enter it.
        """
        directory = self._directory
        owner = os.geteuid()
        if not self._may_be_absent or directory.exists():
            require_run_directory(directory)
            owner = directory.stat().st_uid
        jobs, tasks = _job_directories(directory)
        config = read_trained_config(directory)
        latest = _latest(self._tail)
        state, word = _state(directory, latest, now)
        attempts = _attempts(jobs)
        arrays = tuple(filter(None, (self._array(array, found) for array, found in tasks.items())))
        newest = [job_directory(directory, task) for found in reversed(tasks.values()) for task in found[:1]]
        if self._counts_outputs and now - self._counted >= COUNTED_S:
            self._data, self._counted = _data_stages((*newest, *jobs), now), now
        return RunFiles(
            directory=directory,
            name=str(latest.start.get("name") or config.get("name") or directory.absolute().name),
            owner=owner,
            is_own=os.geteuid() in (0, owner),
            latest=latest,
            state=state,
            word=word,
            secrets=secrets_of(directory),
            config=config,
            attempts=attempts,
            gone=tuple(attempt.job for attempt in attempts if _is_gone(attempt)),
            program=_program(directory, attempts),
            arrays=tuple({array.stage: array for array in arrays}.values()),
            data=self._data[0],
            data_problem=self._data[1],
            checkpoints=_checkpoints(directory, config),
            excluded=_excluded(directory, now),
            disk=_disk(directory),
            unread=unread_records(directory, attempts),
        )

    def _array(self, array: int, tasks: Sequence[str]) -> ArrayFiles | None:
        """The records of the tasks of an array; None if none has started."""
        jobs = self._directory / JOBS
        first = next((attempt for task in tasks for attempt in read_job(jobs / task)), None)
        if first is None:
            return None
        left = [task for task in tasks if task not in self._ended]
        for task, end in zip(
            left, concurrent_map(left, lambda task: read_end(f"{jobs}/{task}")), strict=True
        ):
            if end is not None:
                self._ended[task] = end
        ends = [self._ended[task] for task in tasks if task in self._ended]
        failed = [end for end in ends if end.get("verdict") == "failed"]
        return ArrayFiles(
            job=str(array),
            stage=first.stage,
            began=first.began,
            active=max((end["time"] for end in ends), default=first.began),
            ended=dict(Counter(str(end.get("verdict")) for end in ends)),
            open=tuple(task for task in tasks if task not in self._ended),
            reasons=tuple(str(end.get("reason", "")) for end in failed[:MOST_REASONS]),
        )


def users_of(directory: Path) -> set[int]:
    """User IDs of those whose jobs may belong to a run: the owners of its directory and of its jobs, and this user."""
    jobs, arrays = _job_directories(directory)
    newest = [job_directory(directory, tasks[0]) for tasks in arrays.values()]
    return {os.geteuid(), *_owners((directory, *jobs, *newest))}


def require_run_directory(directory: Path) -> None:
    """Refuses what is not a directory, and a directory that this user may not read.

    Raises:
        HpcgenError: it names the owner of such a directory.
    """
    try:
        with os.scandir(directory):
            return
    except FileNotFoundError:
        hint = (
            "its first job makes it; otherwise, give the directory of a run (paths.run_dir), or its run file"
        )
        raise HpcgenError("no such directory", hint, where=directory) from None
    except NotADirectoryError:
        hint = "give the directory of a run (paths.run_dir), or its run file (.yaml)"
        raise HpcgenError("is a file", hint, where=directory) from None
    except PermissionError:
        owner = user(directory.stat().st_uid)
        hint = "to let others read a run, set share: group in its run file"
        raise HpcgenError(f"may only be read by user {owner}", hint, where=directory) from None


def _job_directories(directory: Path) -> tuple[list[Path], dict[int, list[str]]]:
    """The directories of jobs, and the names of those of the tasks of each array, the oldest array first."""
    jobs = directory / JOBS
    if foreign_link(jobs, directory) is not None:
        return [], {}
    try:
        names = os.listdir(jobs)  # noqa: PTH208 # of ten thousand tasks, without a stat for each
    except OSError:
        return [], {}
    found: dict[int, list[str]] = {}
    others = []
    for name in names:
        if match := ARRAY_TASK.fullmatch(name):
            found.setdefault(int(match[1]), []).append(name)
        else:
            others.append(jobs / name)
    return others, dict(sorted(found.items()))


def _owners(paths: Iterable[Path]) -> Iterable[int]:
    for path in paths:
        with contextlib.suppress(OSError):
            yield path.lstat().st_uid


def _attempts(jobs: Iterable[Path]) -> tuple[JobAttempt, ...]:
    found = [attempt for job in jobs for attempt in read_job(job)]
    return tuple(sorted(found, key=lambda attempt: (attempt.began, attempt.job, attempt.restart)))


def _program(directory: Path, attempts: Sequence[JobAttempt]) -> ProgramProgress | None:
    last = next((attempt for attempt in reversed(attempts) if attempt.stage == PROGRAM), None)
    return program_progress(directory, last) if last is not None else None


def _is_gone(attempt: JobAttempt) -> bool:
    """True if a job of the local launcher without an end ran on this machine, and its process has ended."""
    start = attempt.events[0]
    return attempt.ended is None and process_is_gone(start.get("host"), start.get("pid"))


def _latest(tail: Tail) -> Latest:
    try:
        return tail.read()
    except OSError:
        return NOTHING


def _state(directory: Path, latest: Latest, now: float) -> tuple[State | None, str]:
    state, word = state_of(directory, latest, now)
    return (None, "") if state == "silent" and not word else (state, word)


def _data_stages(jobs: Iterable[Path], now: float) -> tuple[tuple[StageStatus, ...], str]:
    """The data stages of the corpus that the newest job of an array names, and why they cannot be shown."""
    path = next((path for job in jobs if os.access(path := job / "corpus.json", os.R_OK)), None)
    if path is None:
        return (), ""
    if find_spec("msgspec") is None:
        return (), "progress of the data stages needs the extra `data` of hpcgen"
    # These need the extra `data` and import all stages, which only runs with a corpus need.
    from hpcgen.data import manifest, status
    from hpcgen.run_plan import corpus_job

    try:
        job = corpus_job.read_job(path, ())
        planned = manifest.planned(job)
        return tuple(status.corpus_status(job, planned, (), now)), ""
    except (HpcgenError, OSError) as error:
        return (), redact(str(error))


def _checkpoints(directory: Path, config: dict[str, Any]) -> SavedCheckpoints | None:
    path = RunDirectory.recorded(directory, config).checkpoints
    try:
        found = checkpoint_files.list_paths(path)
    except OSError:
        return None
    if not found:
        return None
    times = {each: time for each in found if (time := _completed(each)) is not None}
    newest = next((each for each in found if each in times), None)
    first = found[0]
    iteration = checkpoint_files.iteration_of
    return SavedCheckpoints(
        directory=str(path),
        newest=iteration(newest) if newest else None,
        saved=times[newest] if newest else None,
        complete=len(times),
        saving=iteration(first) if first not in times and _is_started(first) else None,
    )


def _completed(checkpoint: Path) -> float | None:
    try:
        return (checkpoint / checkpoint_files.COMPLETE).lstat().st_mtime
    except OSError:
        return None


def _is_started(checkpoint: Path) -> bool:
    return os.access(checkpoint / checkpoint_files.STARTED, os.F_OK)  # False if it may not be looked at


def _excluded(directory: Path, now: float) -> dict[str, float]:
    try:
        lines = read_text(directory / EXCLUDED, errors="replace").splitlines()[:10_000]
    except OSError:
        return {}
    found = (match.groups() for line in lines if (match := _EXCLUDED.match(line)))
    return {name: float(until) for name, until in found if float(until) > now}


def _disk(directory: Path) -> Disk | None:
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return None
    return Disk(free=usage.free, total=usage.total)
