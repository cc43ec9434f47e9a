"""Creates the run directory with the access that `share` allows, and follows its metrics while a job runs."""

from __future__ import annotations

import errno
import os
import tempfile
from collections import deque
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.errors import FilePlace, HpcgenError
from hpcgen.files import ACCESS, make_directory, shared_as
from hpcgen.slurm.job_files import JOBS
from trainer.contract.files.metrics_line import Event, decode
from trainer.contract.files.regular_file import open_regular
from trainer.contract.files.shared_files import refuse_foreign_link, require_own

if TYPE_CHECKING:
    from hpcgen.run_plan.plan import Plan

STOP_FILE = "stop"
"""Name of the file in the directory of a job on this machine. With it, the job saves and stops."""
MEAN_OF = 10
"""Number of recent steps whose mean loss is shown. The loss of a single step varies with its batch."""


def sharing(plan: Plan) -> AbstractContextManager[None]:
    """Sets the umask for `share` while files of the run are written. submitit's pickles are 0644 by default."""
    return shared_as(plan.config.share)


def make_run_directory(plan: Plan) -> Path:
    """Creates the run directory, and in a private run submitit's folder in it.

    Jobs unpickle what is in the folder, so only the user may write there. In a shared run, others could replace it.

    Raises:
        HpcgenError: it cannot be created, or submitit's folder belongs to another user.
    """
    run_dir = Path(plan.config.paths.run_dir)
    share, folder = plan.config.share, run_dir / "submitit"
    make_directory(run_dir, share)
    try:
        if share == "private":
            folder.mkdir(exist_ok=True)
            folder.chmod(0o700)
        elif run_dir.stat().st_uid == os.geteuid():
            run_dir.chmod(ACCESS[share].directory_mode)
    except OSError as error:
        raise HpcgenError(
            f"cannot be created ({error.strerror})", "correct paths.run_dir", where=FilePlace(error.filename)
        ) from error
    return run_dir


def make_job_directory(plan: Plan, prefix: str) -> tuple[Path, Path]:
    """Creates a new directory in RUN_DIR/jobs that only this user can enter. Returns its path, and one to use it by.

    In a shared run, others can rename it and put another in its place. The second path names it nevertheless, as long
    as this process runs.

    Raises:
        HpcgenError: another user placed a link, or it cannot be created.
    """
    run_dir = Path(plan.config.paths.run_dir)
    jobs = run_dir / JOBS
    try:
        if plan.config.share == "private":
            jobs.mkdir(exist_ok=True)
            job_dir = Path(tempfile.mkdtemp(prefix=prefix, dir=jobs))
            return job_dir, job_dir
        refuse_foreign_link(jobs, run_dir)
        jobs.mkdir(exist_ok=True)
        job_dir = Path(tempfile.mkdtemp(prefix=prefix, dir=jobs))
        held = hold(job_dir, run_dir)
    except OSError as error:
        raise HpcgenError(
            str(error.strerror), "correct paths.run_dir", where=FilePlace(error.filename or jobs)
        ) from error
    return job_dir, held


def hold(directory: Path, root: Path) -> Path:
    """Opens a directory below `root` for as long as this process runs. Returns a path by which its children reach it.

    Raises:
        OSError: another user owns it or can write to it, or its path has a link below `root`.
    """
    held = Path(f"/proc/{os.getpid()}/fd/{os.open(directory, os.O_RDONLY | os.O_DIRECTORY)}")
    require_own(held.stat(), directory)
    if held.readlink() != root.resolve() / directory.relative_to(root):
        raise OSError(errno.ELOOP, "its path has a link", str(directory))
    return held


class Followed:
    """Reads new lines of a metrics.jsonl that is being written.

    Only lines after the `start` line of an attempt that began after `since` (seconds since 1970) are read. Others
    belong to an earlier attempt, or to another command that trains in the same directory.
    """

    def __init__(self, path: Path, since: float) -> None:
        self._path = path
        self._since = since
        self._inode = 0
        self._offset = 0
        self._is_own = False
        self._last: Event = {}
        self._losses: deque[float] = deque(maxlen=MEAN_OF)

    def last_step(self) -> Event:
        """The metrics of this attempt's last step, with the mean loss of MEAN_OF steps; empty before the first."""
        try:
            with open_regular(self._path) as file:
                self._reopen(os.fstat(file.fileno()))
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self._take(line)
        except FileNotFoundError:
            pass
        if not self._losses:
            return self._last
        return {**self._last, "loss": sum(self._losses) / len(self._losses)}

    def _reopen(self, status: os.stat_result) -> None:
        """Restarts at the top if the file was replaced, as when an attempt resumes and drops repeated steps."""
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset, self._is_own, self._last = status.st_ino, 0, False, {}
            self._losses.clear()

    def _take(self, line: bytes) -> None:
        if not self._is_own and b'"start"' not in line:
            return  # skips JSON parsing, as files of long runs have many lines
        event = decode(line)
        if event is None:
            return
        if event["event"] == "start":
            self._is_own = (event.get("time") or 0.0) >= self._since
        elif self._is_own and event["event"] == "step":
            self._last = event
            if event.get("loss") is not None:  # null if fp16 overflowed
                self._losses.append(event["loss"])
