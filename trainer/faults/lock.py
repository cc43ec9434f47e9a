"""One process at a time in a directory: two runs would overwrite each other's files."""

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
from trainer.contract.run_directory import open_nofollow, publish
from trainer.faults.stopping import leave

RUN = ".lock"
"""In a run directory."""

SAVING = ".saving.lock"
"""In a directory of checkpoints, which several run directories may name, and which may be a run directory itself."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of flock on file systems without locks: NFS without its lock daemon, Lustre mounted without flock."""

BEAT_S = 10.0
"""Where there are no locks, the owner of a directory renews its file this often (seconds)."""

WATCH_S = 90.0
"""An owner that has not renewed its file for so long is dead (seconds): NFS may show an old file for 60 s."""

SETTLE_S = 3.0
"""After this time, of several processes that became owner at once, all see the last one (seconds)."""

_held: dict[Path, int] = {}
"""Locks end with their descriptors, so these stay open."""

_claims: dict[Path, _Claim] = {}
"""In place of locks, where there are none."""


def hold(path: Path, busy: str) -> None:
    """Locks the file `path`, which is made, for the life of this process; once more does nothing.

    Where the file system has no locks, `path`.owner says who holds it, and that it is alive.

    Raises:
        RunDirectoryBusyError: another process holds it; says `busy`.
        OSError: it cannot be made.
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
        os.close(held)  # of a directory that is gone
    _held[path] = lock


@dataclass(frozen=True)
class _Owner:
    """The content of an owner's file."""

    token: str
    """Differs from process to process."""
    host: str
    pid: int
    pid_namespace: str
    """A container may number its processes by itself."""
    job: str
    restart: str
    beat: int = 0
    """Counts up while the process lives. No clock is compared: those of hosts differ."""

    @classmethod
    def this_process(cls) -> _Owner:
        return cls(
            token=secrets.token_hex(16),
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_namespace=str(Path("/proc/self/ns/pid").readlink()),
            job=os.environ.get("SLURM_JOB_ID", ""),
            restart=os.environ.get("SLURM_RESTART_COUNT", "0"),
        )

    def is_known_dead(self, asker: _Owner) -> bool:
        """Whether no waiting is needed: an earlier attempt of the asker's job, or a dead process of its host."""
        if asker.job and self.job == asker.job and self.restart != asker.restart:
            return True
        if (self.host, self.pid_namespace) != (asker.host, asker.pid_namespace):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # alive, and another user's
            return False
        return False


class _Claim:
    """Ownership of a directory by a file that this process renews.

    Whoever writes the file last is the owner; one that finds another's name in it ends at once. So two processes that
    both took an owner for dead never go on together for longer than BEAT_S.
    """

    def __init__(self, path: Path, busy: str) -> None:
        """Waits for WATCH_S where another process may be the owner.

        Raises:
            RunDirectoryBusyError: it is; says `busy`.
            OSError: the file cannot be read or written.
        """
        self._file = path.with_name(f"{path.name}.owner")
        self._busy = busy
        self._me = _Owner.this_process()
        _say(f"{path.parent}: this file system has no locks; {self._file.name} says who works in it")
        self._require_dead_owner()
        self._renew()
        time.sleep(SETTLE_S)
        if not self._is_mine():
            raise RunDirectoryBusyError(busy)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lock", daemon=True)
        self._thread.start()
        atexit.register(self._let_go)

    def _require_dead_owner(self) -> None:
        before = _read(self._file)
        if before is None or before.is_known_dead(self._me):
            return
        _say(
            f"{self._file}: process {before.pid} on {before.host} works in this directory, or was killed there; "
            f"waiting {WATCH_S:g} s for a sign of life"
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
        """Whether no other process has taken the directory."""
        now = _read(self._file)
        return now is None or now.token == self._me.token

    def _keep(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a storage that fails is the save's to report
                if not self._is_mine():
                    leave(Exit.FAULT, f"{self._busy} (this process showed no sign of life for {WATCH_S:g} s)")
                self._renew()

    def _let_go(self) -> None:
        """Spares the next process the wait."""
        self._ended.set()
        self._thread.join(BEAT_S)
        with contextlib.suppress(OSError):
            if self._is_mine():
                self._file.unlink()


def _read(file: Path) -> _Owner | None:
    """Who owns the directory; None when there is no file, or none that says it.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return _Owner(**json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _say(line: str) -> None:
    print(f"trainer: {line}", file=sys.stderr, flush=True)


def _forget() -> None:
    for lock in _held.values():
        os.close(lock)
    _held.clear()


# Loader workers outlive a rank that is killed, for a while: they would keep the next attempt out.
os.register_at_fork(after_in_child=_forget)
