"""A file of JSON objects, one a line, that grows while the run lives and loses what is computed again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer.contract.run_directory import next_number, open_nofollow, publish
from trainer.faults.storage import refused

CLOSE_S = 5.0
"""A storage that hangs does not keep a run from ending."""


class JsonLines:
    """Appends lines, each whole or, on a full disk, not at all as far as a reader can tell.

    A thread writes each as soon as the storage has taken those before it: a step never waits for the storage.
    """

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        """`complain` is told once when the file cannot be written, which ends no training. The thread calls it.

        Raises:
            TrainerError: the file cannot be opened.
        """
        self._path, self._complain = path, complain
        try:
            self._file = open(path, "ab", buffering=0, opener=open_nofollow)  # noqa: SIM115
        except OSError as error:
            raise refused(error, path, "written") from error
        self._is_torn = self._has_complained = False
        # Unbounded: a kilobyte a step is little for as long as a storage can hang before the run is ended for it.
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._keep_writing, name=path.name, daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Appends a line, soon. Numbers that JSON does not have become null."""
        text = json.dumps({name: _finite(value) for name, value in line.items()}) + "\n"
        self._waiting.put(text.encode())

    def close(self) -> None:
        """Waits until all lines are in the file, but not for long."""
        self._waiting.put(None)
        self._thread.join(CLOSE_S)
        # The one that the thread is writing is out of the queue, the end is in it: together the number of lines.
        if self._thread.is_alive() and (left := self._waiting.qsize()):
            lines = "the last line" if left == 1 else f"the last {left} lines"
            self._complain(f"{self._path}: {lines} may be missing: not written within {CLOSE_S:g} s")

    def _keep_writing(self) -> None:
        with self._file:
            while (line := self._waiting.get()) is not None:
                self._append(line)

    def _append(self, line: bytes) -> None:
        data = (b"\n" if self._is_torn else b"") + line
        try:
            written = self._file.write(data)
        except OSError as error:
            self._say_once(os.strerror(error.errno or 0))
        else:
            if written != len(data):
                self._is_torn = True
                self._say_once("a line was written in part; is the disk full?")
            else:
                self._is_torn = False

    def _say_once(self, why: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            self._complain(f"{self._path}: {why}; lines are missing from here on, training goes on")


def drop_after(path: Path, iteration: int) -> dict[str, Any] | None:
    """Drops what a life that goes on from `iteration` computes again, and torn lines.

    That is every later iteration, and the evaluation of this one. How each life started and ended stays: that is the
    run's story. Returns the last line that was dropped of the iterations after this one.

    From iteration 0, all numbers of the run would be dropped: a copy of the file stays under the next number.

    Raises:
        TrainerError: the file cannot be read or written. It is as it was.
    """
    try:
        if not path.exists():
            return None
        kept, lost = [], None
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if (entry := _entry(line)) is None:
                    continue
                if _outlives(entry, iteration):
                    kept.append(line)
                elif entry["iteration"] > iteration:
                    lost = entry
        with _copy_of(path) if lost and iteration == 0 else contextlib.nullcontext():
            publish(path, "".join(kept))
    except OSError as error:
        raise refused(error, path, "written") from error
    return lost


@contextlib.contextmanager
def _copy_of(path: Path) -> Iterator[None]:
    """Keeps a file that is about to be replaced, under the next number, unless that fails."""
    copy = next_number(path)
    try:
        os.link(path, copy)
    except PermissionError:  # a file system without links
        shutil.copyfile(path, copy)
    try:
        yield
    except OSError:
        copy.unlink()
        raise


def _entry(line: str) -> dict[str, Any] | None:
    """What a line holds; None of a torn one, and of nobody's."""
    try:
        entry = json.loads(line)
        is_one = line.endswith("\n") and isinstance(entry["iteration"], int) and "event" in entry
    except (ValueError, TypeError, KeyError):
        return None
    return entry if is_one else None


def _outlives(entry: dict[str, Any], iteration: int) -> bool:
    event, at = entry["event"], entry["iteration"]
    return event in {"start", "stop"} or at < iteration or (at == iteration and event != "evaluation")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
