"""Copies a directory at every moment at which kill -9 could leave it in an incomplete state.

Python imports this module at its start where its folder is in PYTHONPATH. Before and after every fsync, rename and
replace of the process, it copies the directory SNAPSHOT_OF to SNAPSHOT_TO/NUMBER, if it differs from the copy before.
A process that is killed there leaves just that: what it wrote into a buffer of its own is lost.
SLEEP_AT_FSYNC makes a storage slow: each fsync takes so many seconds.
HOLD_SAVE keeps the save of that number open, from its first tensors on: HELD then appears.
FAIL_SAVES makes so many saves of the rank FAIL_RANK fail, each at its first tensors, as storage does for a moment.
AT_LOAD is what becomes of the rank AT_LOAD_RANK where it reads its first tensors to load them: `die`, or an errno.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import sys
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


def _hold(number: int, held: Path) -> None:
    fsync, saves = os.fsync, set[str]()

    def hold(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.suffix == ".distcp":
            saves.add(path.parent.name)
            if len(saves) == number:
                held.touch()
                time.sleep(600)
        fsync(descriptor)

    os.fsync = hold


def _fail(number: int) -> None:
    fsync, saves = os.fsync, set[Path]()

    def fail(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.suffix == ".distcp" and (len(saves) < number or path.parent in saves):
            saves.add(path.parent)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    os.fsync = fail


def _strike_at_load(what: str) -> None:
    def strike(event: str, arguments: tuple[Any, ...]) -> None:
        # Other threads compare the files with the record, or write them.
        if event == "open" and str(arguments[0]).endswith(".distcp") and _is_main_thread():
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(int(what), os.strerror(int(what)), str(arguments[0]))

    sys.addaudithook(strike)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


if "HOLD_SAVE" in os.environ:
    _hold(int(os.environ["HOLD_SAVE"]), Path(os.environ["HELD"]))
if os.environ.get("FAIL_RANK") == os.environ.get("RANK", ""):
    _fail(int(os.environ["FAIL_SAVES"]))
if os.environ.get("AT_LOAD_RANK") == os.environ.get("RANK", ""):
    _strike_at_load(os.environ["AT_LOAD"])
if "SNAPSHOT_OF" in os.environ:
    _install(Path(os.environ["SNAPSHOT_OF"]), Path(os.environ["SNAPSHOT_TO"]))
if "SLEEP_AT_FSYNC" in os.environ:
    _slow_down(float(os.environ["SLEEP_AT_FSYNC"]))
