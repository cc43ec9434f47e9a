"""JSON Lines file that grows during a run. Lines of steps that are computed again are removed."""

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

from trainer.contract.files.regular_file import opener
from trainer.contract.files.run_directory import next_number, open_nofollow, publish
from trainer.faults.storage import storage_error

CLOSE_S = 5.0
"""Timeout of the last writes, so that hanging storage does not block the end of a run (seconds)."""


class JsonLines:
    """Appends lines. On a full disk a line may be incomplete; readers skip such lines.

    A thread writes the lines in order, so that a step never waits for the storage.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """The thread calls `warn` once if the file cannot be written. This does not end the training.

        Raises:
            TrainerError: the file cannot be opened.
        """
        self._path, self._warn = path, warn
        try:
            self._file = open(path, "ab", buffering=0, opener=open_nofollow)  # noqa: SIM115
        except OSError as error:
            raise storage_error(error, path, "written") from error
        self._is_torn = self._has_warned = False
        # Unbounded: at a kilobyte per step, it stays small until the watch ends a run whose storage hangs.
        self._waiting: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name=path.name, daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Queue a line. Numbers that JSON cannot represent become null."""
        text = json.dumps({name: _finite(value) for name, value in line.items()}) + "\n"
        self._waiting.put(text.encode())

    def sync(self) -> None:
        """Wait until all lines are on disk, as far as they can be written."""
        synced = threading.Event()
        self._waiting.put(synced)
        synced.wait()

    def close(self) -> None:
        """Wait for at most CLOSE_S until all lines are in the file."""
        self._waiting.put(None)
        self._thread.join(CLOSE_S)
        # The queue has the end marker but not the line in progress, so its size is the number of unwritten lines.
        if self._thread.is_alive() and (left := self._waiting.qsize()):
            lines = "the last line" if left == 1 else f"the last {left} lines"
            self._warn(f"{self._path}: {lines} may be missing: not written within {CLOSE_S:g} s")

    def _write_all(self) -> None:
        with self._file:
            while (item := self._waiting.get()) is not None:
                if isinstance(item, bytes):
                    self._append(item)
                    continue
                with contextlib.suppress(OSError):
                    os.fsync(self._file.fileno())
                item.set()

    def _append(self, line: bytes) -> None:
        data = (b"\n" if self._is_torn else b"") + line
        try:
            written = self._file.write(data)
        except OSError as error:
            self._warn_once(os.strerror(error.errno or 0))
        else:
            if written != len(data):
                self._is_torn = True
                self._warn_once("a line was only partly written (is the disk full?)")
            else:
                self._is_torn = False

    def _warn_once(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"{self._path}: {reason}. Lines are missing from here on; training continues")


def drop_after(path: Path, iteration: int) -> dict[str, Any] | None:
    """Remove incomplete lines, and lines that an attempt resuming from `iteration` computes again.

    The latter are the lines of later iterations, and the evaluation at `iteration`. The starts and stops of all
    attempts are kept. Returns the last removed line of a later iteration.

    At iteration 0 this removes all numbers of the run, so a copy of the file is kept (metrics.jsonl.1, .2, ...).

    Raises:
        TrainerError: the file cannot be read or written. It is unchanged.
    """
    try:
        if not path.exists():
            return None
        kept, lost = [], None
        with open(path, encoding="utf-8", errors="replace", opener=opener) as lines:
            for line in lines:
                if (entry := _entry(line)) is None:
                    continue
                if _is_kept(entry, iteration):
                    kept.append(line)
                elif entry["iteration"] > iteration:
                    lost = entry
        with _keeping_copy(path) if lost and iteration == 0 else contextlib.nullcontext():
            publish(path, "".join(kept))
    except OSError as error:
        raise storage_error(error, path, "written") from error
    return lost


@contextlib.contextmanager
def _keeping_copy(path: Path) -> Iterator[None]:
    """Keep a numbered copy of a file while it is replaced. Removes the copy if the replacement fails."""
    copy = next_number(path)
    try:
        os.link(path, copy)
    except PermissionError:  # the file system does not support hard links
        shutil.copyfile(path, copy)
    try:
        yield
    except OSError:
        copy.unlink()
        raise


def _entry(line: str) -> dict[str, Any] | None:
    """Parse a line; None if it is incomplete or not an event."""
    try:
        entry = json.loads(line)
        is_valid = line.endswith("\n") and isinstance(entry["iteration"], int) and "event" in entry
    except (ValueError, TypeError, KeyError):
        return None
    return entry if is_valid else None


def _is_kept(entry: dict[str, Any], iteration: int) -> bool:
    event, at = entry["event"], entry["iteration"]
    return event in {"start", "stop"} or at < iteration or (at == iteration and event != "evaluation")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
