"""Counts the file operations of every Python process below a test, and kills all of them at a given operation.

Python imports this module at its start where its folder is in PYTHONPATH. An operation is a write of a file (a system
call, not a write into a buffer), fsync, rename, unlink, or the making of a file. Variables of the environment:
    KILL_COUNTER   a file that grows by a byte at each operation, over all processes
    KILL_AT        number of the operation, from 1, at which the process group is killed with SIGKILL (0: never)
    KILL_HOW       before: instead of the operation; after: right after it; torn: after half of a write;
                   self: before, and only the process that is at it is killed;
                   sleep: nobody is killed, the process that is at it sleeps instead of the operation
"""

from __future__ import annotations

import builtins
import io
import os
import signal
import time
from collections.abc import Callable
from typing import Any

_open = io.open
_os_open = os.open


def _install(counter: str, at: int, how: str) -> None:
    descriptor = _os_open(counter, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os_write = os.write

    def is_last() -> bool:
        os_write(descriptor, b".")
        # the position is the end of this byte, also if other processes append
        return os.lseek(descriptor, 0, os.SEEK_CUR) == at

    def die() -> None:
        if how == "sleep":
            time.sleep(600)
        if how == "self":
            os.kill(os.getpid(), signal.SIGKILL)
        os.killpg(0, signal.SIGKILL)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            last = is_last()
            if last and how != "after":
                die()
            result = function(*args, **keywords)
            if last:
                die()
            return result

        return call

    class CountedFile(io.FileIO):
        def write(self, data: Any) -> int:
            last = is_last()
            if last and how in ("before", "self", "sleep"):
                die()
            view = memoryview(data).cast("B")
            written = super().write(view[: len(view) // 2] if last and how == "torn" else view)
            if last:
                die()
            return written

    def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **keywords: Any) -> Any:
        if "b" not in mode or mode in ("rb", "br") or isinstance(file, int):
            return _open(file, mode, buffering, *args, **keywords)
        last = is_last()
        if last and how != "after":
            die()
        raw = CountedFile(file, mode.replace("b", ""))
        if last:
            die()
        if buffering == 0:
            return raw
        return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

    builtins.open = io.open = opened  # type: ignore[assignment]
    # os.write is left out: it is used for pipes between processes
    for name in ("fsync", "fdatasync", "rename", "replace", "unlink", "remove", "pwrite", "truncate"):
        setattr(os, name, counted(getattr(os, name)))


if "KILL_COUNTER" in os.environ:
    _install(os.environ["KILL_COUNTER"], int(os.environ["KILL_AT"]), os.environ.get("KILL_HOW", "before"))
