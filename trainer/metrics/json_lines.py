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

from trainer.contract.files.metrics_times import NOTE_BYTES, TIMES, read_note, times_of
from trainer.contract.files.regular_file import opener
from trainer.contract.files.run_directory import RunDirectory, next_number, open_nofollow, publish
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
        self._waiting: queue.SimpleQueue[bytes | threading.Event | dict[str, Any] | None] = (
            queue.SimpleQueue()
        )
        self._latest_note: dict[str, Any] = {}
        self._notes: int | None = None
        self._thread = threading.Thread(target=self._write_all, name=path.name, daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Queue a line. Numbers that JSON cannot represent become null."""
        text = json.dumps({name: _finite(value) for name, value in line.items()}) + "\n"
        self._waiting.put(text.encode())

    def note(self, line: dict[str, Any]) -> None:
        """Keep `line` in the file last-step.json, in place of earlier notes, until a line for it is written.

        After a kill, it tells which steps are lost. Costs the caller a microsecond.
        """
        self._latest_note = line
        self._waiting.put(line)

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
                elif isinstance(item, dict):
                    self._write_note(item)
                else:
                    with contextlib.suppress(OSError):
                        os.fsync(self._file.fileno())
                    item.set()
        self._remove_note()

    def _write_note(self, line: dict[str, Any]) -> None:
        """Write the latest note. A failure only makes the account of lost steps less exact."""
        if line is not self._latest_note:
            return
        with contextlib.suppress(OSError):
            if self._notes is None:
                path = self._path.with_name(RunDirectory.LAST_STEP)
                self._notes = open_nofollow(str(path), os.O_WRONLY | os.O_CREAT)
            os.pwrite(self._notes, json.dumps(line).ljust(NOTE_BYTES - 1).encode() + b"\n", 0)

    def _remove_note(self) -> None:
        if self._notes is not None:
            os.close(self._notes)
            with contextlib.suppress(OSError):
                self._path.with_name(RunDirectory.LAST_STEP).unlink()

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


def drop_after(path: Path, iteration: int, last_step: Path) -> dict[str, Any] | None:
    """Remove incomplete lines, and lines that an attempt resuming from `iteration` computes again.

    The latter are the lines of later iterations, and the evaluation at `iteration`. The starts, first steps and stops
    of all attempts are kept. Returns what is lost with the lines of later iterations and the note in `last_step`: the
    last iteration and its time, and the seconds of each kind in TIMES. None if nothing is.

    At iteration 0 this removes all numbers of the run, so a copy of the file is kept (metrics.jsonl.1, .2, ...).

    Raises:
        TrainerError: the file cannot be read or written. It is unchanged.
    """
    try:
        if not path.exists():
            return None
        kept, lost = [], _Lost()
        with open(path, encoding="utf-8", errors="replace", opener=opener) as lines:
            for line in lines:
                if (entry := _entry(line)) is None:
                    continue
                if _is_kept(entry, iteration):
                    kept.append(line)
                elif entry["iteration"] > iteration:
                    lost.add(entry)
        lost.add_note(read_note(last_step), iteration)
        with _keeping_copy(path) if lost.entry and iteration == 0 else contextlib.nullcontext():
            publish(path, "".join(kept))
        last_step.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, path, "written") from error
    return lost.entry or None


class _Lost:
    """Sums over the lines that are removed."""

    def __init__(self) -> None:
        self.entry: dict[str, Any] = {}

    def add(self, line: dict[str, Any]) -> None:
        """Add a line of a later iteration."""
        lost, times = self.entry, times_of(line)
        self.entry = {
            "iteration": max(line["iteration"], lost.get("iteration", 0)),
            "time": line.get("time", lost.get("time")),
            **{name: round(times[name] + lost.get(name, 0.0), 6) for name in TIMES},
        }

    def add_note(self, note: dict[str, Any] | None, iteration: int) -> None:
        """Add the note about the last step, unless a line has the step."""
        if note is not None and note["iteration"] > max(iteration, self.entry.get("iteration", 0)):
            self.add(note)


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
    return (
        event in {"start", "first_step", "stop"}
        or at < iteration
        or (at == iteration and event != "evaluation")
    )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
