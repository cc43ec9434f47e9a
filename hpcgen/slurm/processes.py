"""Processes that end together with everything they started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def term_exits() -> Iterator[None]:
    """Makes SIGTERM (from Slurm, `timeout` or `kill`) raise SystemExit, so that cleanup code runs.

    By default, SIGTERM would end this process and leave its children and private files.
    """

    def leave(signal_number: int, frame: Any) -> NoReturn:
        raise SystemExit(128 + signal_number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_with_parent() -> None:
    """Asks Linux to send this process SIGTERM when its parent is gone, even by SIGKILL. For `preexec_fn`."""
    with contextlib.suppress(AttributeError):  # another system
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def kill_tree(root: int) -> None:
    """Kills a child of this process and all its descendants with SIGKILL.

    They are stopped first: if a process is killed before its children are listed, these are lost.
    """
    stopped: set[int] = set()
    while new := process_tree(root) - stopped:
        _send(new, signal.SIGSTOP)
        stopped |= new
    _send(stopped, signal.SIGKILL)


def process_tree(root: int) -> set[int]:
    """The PIDs of `root` and all its descendants that exist."""
    parents = _parents()
    tree = {root} & parents.keys()
    while new := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= new
    return tree


def _parents() -> dict[int, int]:
    """PID -> parent PID of every process on this machine."""
    if Path("/proc/self/stat").exists():  # Linux, where small images may lack ps
        return dict(_parents_in_proc())
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    return {int(pid): int(parent) for pid, parent in map(str.split, listing.stdout.splitlines())}


def _parents_in_proc() -> Iterable[tuple[int, int]]:
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                # PID (NAME) STATE PARENT ..., where NAME can contain any character
                state = (directory / "stat").read_bytes().rpartition(b")")[2].split()
                yield int(directory.name), int(state[1])


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
