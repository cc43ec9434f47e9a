"""System calls on files: flushes and locks."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO


def sync_path(path: Path) -> None:
    """Flushes a file, or the renames and removals in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(file: BinaryIO) -> bool:
    """Locks a file until it is closed. Returns False if it is already locked or the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
