"""One process at a time in a directory: two runs would overwrite each other's files."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from trainer.errors import RunDirectoryBusyError
from trainer.run_directory import open_nofollow

RUN = ".lock"
"""In a run directory."""

SAVING = ".saving.lock"
"""In a directory of checkpoints, which several run directories may name, and which may be a run directory itself."""

_held: dict[Path, int] = {}
"""Locks end with their descriptors, so these stay open."""


def hold(path: Path, busy: str) -> None:
    """Locks the file `path`, which is made, for the life of this process; once more does nothing.

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
    except BlockingIOError:
        os.close(lock)
        raise RunDirectoryBusyError(busy) from None
    except OSError:
        os.close(lock)  # a file system without locks
        return
    if held is not None:
        os.close(held)  # of a directory that is gone
    _held[path] = lock


def _let_go() -> None:
    for lock in _held.values():
        os.close(lock)
    _held.clear()


# Loader workers outlive a rank that is killed, for a while: they would keep the next life out.
os.register_at_fork(after_in_child=_let_go)
