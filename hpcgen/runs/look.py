"""Looks at runs: reads their files, and asks Slurm once for the jobs of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcgen.runs.files import RunReader, users_of
from hpcgen.runs.slurm import NO_ACCOUNTS, Queue, ask_accounts, ask_queue
from hpcgen.runs.status import RunStatus, status_of, unsettled_jobs


class Onlooker:
    """Looks at the same runs several times. Files are read from where the last look ended."""

    def __init__(self, directories: Sequence[Path], *, slurm_s: float = 0.0) -> None:
        """`slurm_s`: seconds for which an answer of Slurm is used."""
        self._directories = directories
        self._readers = [RunReader(directory) for directory in directories]
        self._slurm_s = slurm_s
        self._queue: Queue | None = None
        self._accounts = NO_ACCOUNTS

    def look(self, now: float) -> list[RunStatus]:
        """The status of each run at the time `now` (Unix time in seconds).

        Slurm is asked before the files are read: a job that ends in between has recorded its end.

        Raises:
            HpcgenError: a directory does not exist or may not be read.
        """
        is_due = self._queue is None or now - self._queue.asked >= self._slurm_s
        if self._queue is None or is_due:
            users = {user for directory in self._directories for user in users_of(directory)}
            self._queue = ask_queue(users)
        runs = [reader.read(now) for reader in self._readers]
        if is_due:
            self._accounts = ask_accounts(unsettled_jobs(runs, self._queue))
        return [status_of(run, self._queue, self._accounts, now) for run in runs]


def look(directories: Sequence[Path], now: float) -> list[RunStatus]:
    """The status of each run at the time `now` (Unix time in seconds): one squeue, and at most one sacct.

    Raises:
        HpcgenError: a directory does not exist or may not be read.
    """
    return Onlooker(directories).look(now)
