"""Keeps what a directory holds at each moment at which kill -9 could leave something half done.

Python imports this module at its start where its folder is in PYTHONPATH. Before and after every fsync, rename and
replace of the process, it copies the directory SNAPSHOT_OF to SNAPSHOT_TO/NUMBER, if it differs from the copy before.
A process that is killed there leaves just that: what it wrote into a buffer of its own is lost.
SLEEP_AT_FSYNC makes a storage slow: each fsync takes so many seconds.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("fsync", "rename", "replace")


def _install(directory: Path, copies: Path) -> None:
    lock, numbers = threading.RLock(), itertools.count()
    last: list[dict[str, tuple[int, int]]] = [{}]

    def keep() -> None:
        if not directory.exists():
            return
        now = {str(path): (path.stat().st_ino, path.stat().st_size) for path in directory.rglob("*")}
        if now != last[0]:
            last[0] = now
            shutil.copytree(directory, copies / f"{next(numbers):04d}")

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            with lock:
                keep()
                result = function(*args, **keywords)
                keep()
                return result

        return call

    for name in NAMES:
        setattr(os, name, watched(getattr(os, name)))
    shutil.rmtree = watched(shutil.rmtree)  # nothing may vanish while a copy is made


def _slow_down(seconds: float) -> None:
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(seconds)
        fsync(descriptor)

    os.fsync = slow


if "SNAPSHOT_OF" in os.environ:
    _install(Path(os.environ["SNAPSHOT_OF"]), Path(os.environ["SNAPSHOT_TO"]))
if "SLEEP_AT_FSYNC" in os.environ:
    _slow_down(float(os.environ["SLEEP_AT_FSYNC"]))
