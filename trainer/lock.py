"""One process trains in a run directory: two would overwrite each other's checkpoints."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from trainer.errors import RunDirectoryBusyError


def lock(directory: Path) -> None:
    """Locks a directory for the life of this process.

    Raises:
        RunDirectoryBusyError: another process holds it.
        OSError: nothing can be written there.
    """
    file = (directory / ".lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunDirectoryBusyError(
            f"another process is training in {directory}; wait for it, or name another run_dir"
        ) from None
    except OSError:
        return  # a file system without locks
    # The lock lasts until no process has the file open any more: this one keeps it open by the hook, and its children,
    # of which loader workers outlive a rank that is killed, close it.
    os.register_at_fork(after_in_child=file.close)
