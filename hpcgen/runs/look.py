"""Looks at runs: reads their files, and asks Slurm once for the jobs of all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from hpcgen.errors import HpcgenError
from hpcgen.logs.failure import Failure
from hpcgen.runs.failures import root_failure
from hpcgen.runs.files import RunFiles, RunReader, users_of
from hpcgen.runs.slurm import NO_ACCOUNTS, Queue, ask_accounts, ask_queue
from hpcgen.runs.status import RunStatus, status_of, unsettled_jobs
from trainer.contract.record import replaced

MOST_WITH_LOGS = 10


class RunWatcher:
    """Watches runs: looks at the same ones several times. Files are read from where the last look ended."""

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        slurm_s: float = 0.0,
        reads_logs: bool = True,
        counts_outputs: bool = True,
        leaves_out: bool = False,
        planned: Collection[Path] = (),
    ) -> None:
        """`slurm_s`: seconds for which an answer of Slurm is used. With `reads_logs`, failures are looked up there.
        `counts_outputs`: as for RunReader. With `leaves_out`, a run that cannot be read is left out, and `problems`
        says why. `planned`: directories that the first job makes.
        """
        self._directories = directories
        self._readers = [
            RunReader(directory, counts_outputs=counts_outputs, may_be_absent=directory in planned)
            for directory in directories
        ]
        self._slurm_s = slurm_s
        self._queue: Queue | None = None
        self._accounts = NO_ACCOUNTS
        self._reads_logs = reads_logs
        self._leaves_out = leaves_out
        self.problems: list[str] = []
        self._failures: dict[tuple[Path, str, int], Failure | None] = {}

    def look(self, now: float) -> list[RunStatus]:
        """The status of each run at the time `now` (Unix time in seconds).

        Slurm is asked before the files are read: a job that ends in between has recorded its end.

        Raises:
            HpcgenError: a directory does not exist or may not be read, without `leaves_out`.
        """
        is_due = self._queue is None or now - self._queue.asked >= self._slurm_s
        if self._queue is None or is_due:
            users = {user for directory in self._directories for user in users_of(directory)}
            self._queue = ask_queue(users)
        runs = list(self._read(now))
        if is_due:
            self._accounts = ask_accounts(unsettled_jobs(runs, self._queue))
        found = [status_of(run, self._queue, self._accounts, now) for run in runs]
        if not self._reads_logs:
            return found
        return [self._with_failure(run, status) for run, status in zip(runs, found, strict=True)]

    def _read(self, now: float) -> Iterator[RunFiles]:
        self.problems = []
        for directory, reader in zip(self._directories, self._readers, strict=True):
            try:
                yield reader.read(now)
            except (HpcgenError, OSError) as error:
                if not self._leaves_out:
                    raise
                own = isinstance(error, HpcgenError)
                self.problems.append(str(error) if own else f"{directory} cannot be read: {error}")

    def _with_failure(self, run: RunFiles, status: RunStatus) -> RunStatus:
        """The status with the root failure of the last attempt that ended, from its logs."""
        states = ("failed", "killed", "requeued")
        ended = [index for index, each in enumerate(status.attempts) if each.state in states]
        if not ended:
            return status
        attempt = run.attempts[ended[-1]]
        key = (run.directory, attempt.job, attempt.restart)
        if key not in self._failures:
            with contextlib.suppress(OSError):
                self._failures[key] = root_failure(run.directory, attempt)
        attempts = list(status.attempts)
        attempts[ended[-1]] = replaced(attempts[ended[-1]], failure=self._failures.get(key))
        return replaced(status, attempts=tuple(attempts))


def look(directories: Sequence[Path], now: float, planned: Collection[Path] = ()) -> list[RunStatus]:
    """The status of each run at the time `now` (Unix time in seconds): one squeue, and at most one sacct.

    Logs are read for at most MOST_WITH_LOGS runs, since each can have gigabytes.

    Raises:
        HpcgenError: a directory that is not in `planned` does not exist, or one may not be read.
    """
    return RunWatcher(directories, reads_logs=len(directories) <= MOST_WITH_LOGS, planned=planned).look(now)
