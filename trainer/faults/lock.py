"""Directory locks: two runs in one directory would overwrite each other's files."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from trainer.contract.errors import Exit, RunDirectoryBusyError
from trainer.contract.files.regular_file import read_text
from trainer.contract.files.run_directory import open_nofollow, publish
from trainer.distributed import slurm_job
from trainer.faults.stopping import leave

RUN = ".lock"
"""Lock file of a run directory."""

SAVING = ".saving.lock"
"""Lock file of a checkpoint directory. Several runs may name the same one, and it may also be a run directory."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of flock on file systems without locks, such as NFS without its lock daemon or Lustre without flock."""

BEAT_S = 10.0
"""Interval at which the owner of a directory renews its file if the file system has no locks (seconds)."""

WATCH_S = 90.0
"""Time after which an owner that has not renewed its file counts as dead (seconds). NFS may cache a file for 60 s."""

SETTLE_S = 3.0
"""Time after which several processes that claimed a directory at once all see the last claim (seconds)."""

_held: dict[Path, int] = {}
"""Descriptors of the locks. A lock ends when its descriptor is closed."""

_claims: dict[Path, _Claim] = {}
"""Claims on directories whose file systems have no locks."""


def hold(path: Path, busy: str) -> None:
    """Create and lock the file `path` until this process ends. A second call does nothing.

    If the file system has no locks, the file `path`.owner names the owner, which renews it while it runs.

    Raises:
        RunDirectoryBusyError: another process holds the lock. The message is `busy`.
        OSError: the file cannot be created.
    """
    lock = open_nofollow(str(path), os.O_RDWR | os.O_CREAT)
    held = _held.get(path)
    if held is not None and os.path.sameopenfile(held, lock):
        os.close(lock)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise RunDirectoryBusyError(busy) from None
        if error.errno not in NO_LOCKS:
            raise
        if path not in _claims:
            _claims[path] = _Claim(path, busy)
        return
    if held is not None:
        os.close(held)  # belonged to a directory that was removed
    _held[path] = lock


@dataclass(frozen=True)
class _Owner:
    """Content of an owner file."""

    token: str
    """Random and unique to the process."""
    host: str
    pid: int
    pid_namespace: str
    """Namespace of `pid`, since a container may have its own process IDs."""
    job: str
    restart: str
    beat: int = 0
    """Counter that increases while the process runs. Clocks are not compared, since clocks of different hosts
    disagree."""

    @classmethod
    def this_process(cls) -> _Owner:
        return cls(
            token=secrets.token_hex(16),
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_namespace=str(Path("/proc/self/ns/pid").readlink()),
            job=slurm_job.job_id(),
            restart=str(slurm_job.restart_count()),
        )

    def is_known_dead(self, asker: _Owner) -> bool:
        """True if the owner is certainly dead: an earlier attempt of the asker's job, or a dead process on its host."""
        if asker.job and self.job == asker.job and self.restart != asker.restart:
            return True
        if (self.host, self.pid_namespace) != (asker.host, asker.pid_namespace):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # alive, but owned by another user
            return False
        return False


class _Claim:
    """Ownership of a directory, by a file that this process renews.

    The last process to write the file is the owner; a process that finds a foreign token in it ends at once. So if two
    processes both consider an owner dead, they run at the same time for at most BEAT_S.
    """

    def __init__(self, path: Path, busy: str) -> None:
        """Claim the directory of `path`. Waits for WATCH_S if another process may own it.

        Raises:
            RunDirectoryBusyError: another process owns it. The message is `busy`.
            OSError: the file cannot be read or written.
        """
        self._file = path.with_name(f"{path.name}.owner")
        self._busy = busy
        self._me = _Owner.this_process()
        _print(
            f"{path.parent}: this file system has no locks; {self._file.name} names the owner of the directory"
        )
        self._require_dead_owner()
        self._renew()
        time.sleep(SETTLE_S)
        if not self._is_mine():
            raise RunDirectoryBusyError(busy)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_periodically, name="lock", daemon=True)
        self._thread.start()
        atexit.register(self._release)

    def _require_dead_owner(self) -> None:
        before = _read(self._file)
        if before is None or before.is_known_dead(self._me):
            return
        _print(
            f"{self._file}: process {before.pid} on {before.host} owns this directory, or was killed while it did; "
            f"waiting {WATCH_S:g} s for it to renew the file"
        )
        end = time.monotonic() + WATCH_S
        while time.monotonic() < end:
            time.sleep(BEAT_S / 10)
            now = _read(self._file)
            if now is None:
                return
            if now != before:
                raise RunDirectoryBusyError(self._busy)

    def _renew(self) -> None:
        self._me = dataclasses.replace(self._me, beat=self._me.beat + 1)
        publish(self._file, json.dumps(dataclasses.asdict(self._me)) + "\n")

    def _is_mine(self) -> bool:
        """True if no other process has claimed the directory."""
        now = _read(self._file)
        return now is None or now.token == self._me.token

    def _renew_periodically(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError):  # saves report failing storage
                if not self._is_mine():
                    leave(
                        Exit.FAULT, f"{self._busy} (this process had not renewed its claim for {WATCH_S:g} s)"
                    )
                self._renew()

    def _release(self) -> None:
        """Remove the file, so that the next process does not wait."""
        self._ended.set()
        self._thread.join(BEAT_S)
        with contextlib.suppress(OSError):
            if self._is_mine():
                self._file.unlink()


def _read(file: Path) -> _Owner | None:
    """The owner of the directory; None if the file is missing or invalid.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        return _Owner(**json.loads(read_text(file)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _print(line: str) -> None:
    print(f"trainer: {line}", file=sys.stderr, flush=True)


def _close_locks() -> None:
    for lock in _held.values():
        os.close(lock)
    _held.clear()


# Loader workers survive a killed rank for a while, and would keep the locks from the next attempt.
os.register_at_fork(after_in_child=_close_locks)
