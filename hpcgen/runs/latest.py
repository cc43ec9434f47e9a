"""The end of a metrics.jsonl: the newest step of a run and its pace. Quick, and needs only the standard library."""

from __future__ import annotations

import os
from pathlib import Path

from hpcgen.runs.metrics_line import Event, decode, number_or_none
from trainer.contract.files.regular_file import open_regular
from trainer.contract.record import record, replaced

_WINDOW = 256 << 10
"""Bytes that are read at first: some 600 lines. The pace is that of these lines."""
_DECODED = 32 << 10
"""Bytes at the end whose lines are all decoded. Before them, only one step and the last start are."""
_LARGEST_WINDOW = 16 << 20
"""The window grows to this size as long as it has neither: a line with the user's code may be large."""


@record(kw_only=True)
class Latest:
    """What a run recorded last. An event is empty if the end of the file has none."""

    start: Event
    """Start of the last attempt."""
    first_step: Event
    """First step of the last attempt in the window."""
    step: Event
    evaluation: Event
    checkpoint: Event
    stop_reason: str | None
    """Reason recorded when the last attempt stopped early."""
    last_time: float | None
    """Time of the last line."""

    @property
    def iteration(self) -> int | None:
        """Last iteration that was recorded."""
        found = self.step or self.start
        return int(found["iteration"]) if found else None

    @property
    def pace_s(self) -> float | None:
        """Seconds per step of the last attempt, with saves and evaluations. None before its second line."""
        began, ended = (number_or_none(event.get("time")) for event in (self.first_step, self.step))
        if began is None or ended is None or ended <= began:
            return None
        steps: int = self.step["iteration"] - self.first_step["iteration"]
        return (ended - began) / steps if steps > 0 else None


NOTHING = Latest(
    start={}, first_step={}, step={}, evaluation={}, checkpoint={}, stop_reason=None, last_time=None
)


class Tail:
    """Reads the end of a metrics.jsonl, and afterwards only what was added to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self._latest = NOTHING

    def read(self) -> Latest:
        """What the run recorded last; NOTHING without the file.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            with open_regular(self._path) as file:
                status = os.fstat(file.fileno())
                if (
                    status.st_ino != self._inode or status.st_size < self._offset
                ):  # a resume replaces the file
                    self._inode, self._latest = status.st_ino, NOTHING
                    self._offset = self._open(file.fileno(), status.st_size)
                self._take_all(self._added(file.fileno(), status.st_size))
        except FileNotFoundError:
            self._inode, self._offset, self._latest = 0, 0, NOTHING
        return self._latest

    def _open(self, descriptor: int, size: int) -> int:
        """Finds the last attempt and its first step in the window. Returns the offset of the lines to decode."""
        window = _WINDOW
        while True:
            begin = max(0, size - window)
            lines = os.pread(descriptor, size - begin, begin).splitlines(keepends=True)
            if begin:
                begin += len(lines.pop(0)) if lines else 0  # cut off
            if self._find_first(lines) or begin == 0 or window >= _LARGEST_WINDOW:
                break
            window *= 4
        decoded, has_step = 0, False
        while lines and (not has_step or decoded + len(lines[-1]) <= _DECODED):
            has_step = has_step or _of_kind("step", lines[-1]) is not None
            decoded += len(lines.pop())
        return begin + sum(map(len, lines))

    def _find_first(self, lines: list[bytes]) -> bool:
        """Takes the last start among `lines`, and the first step after it. Returns whether there is either."""
        first, found = 0, False
        for index in range(len(lines) - 1, -1, -1):
            if (event := _of_kind("start", lines[index])) is not None:
                self._take(event)
                first, found = index + 1, True
                break
        for line in lines[first:]:
            if (event := _of_kind("step", line)) is not None:
                self._take(event)
                return True
        return found

    def _added(self, descriptor: int, size: int) -> list[bytes]:
        """The complete lines from the offset on."""
        data = os.pread(descriptor, size - self._offset, self._offset)
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        return data.splitlines()

    def _take_all(self, lines: list[bytes]) -> None:
        for line in lines:
            if event := decode(line):
                self._take(event)

    def _take(self, event: Event) -> None:
        latest, kind = self._latest, event["event"]
        time = number_or_none(event.get("time"))
        latest = replaced(latest, last_time=latest.last_time if time is None else time)
        if kind == "start":
            latest = replaced(latest, start=event, first_step={}, step={}, stop_reason=None)
        elif kind == "step":
            latest = replaced(latest, first_step=latest.first_step or event, step=event)
        elif kind in ("evaluation", "checkpoint"):
            latest = replaced(latest, **{kind: event})
        elif kind == "stop":
            latest = replaced(latest, stop_reason=str(event.get("reason") or "asked to stop"))
        self._latest = latest


def _of_kind(kind: str, line: bytes) -> Event | None:
    """The event in a line if it is of this kind. Other lines are not decoded."""
    event = decode(line) if f'"{kind}"'.encode() in line else None
    return event if event and event["event"] == kind else None
