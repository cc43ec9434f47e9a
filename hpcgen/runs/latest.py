"""The end of a metrics.jsonl: the newest step of a run and its pace. Quick, and needs only the standard library."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainer.contract.files.metrics_line import Event, decode, number_or_none
from trainer.contract.files.regular_file import open_regular
from trainer.contract.record import record, replaced
from trainer.contract.wording import ASKED_TO_STOP

_WINDOW = 256 << 10
"""Bytes that are read at first: some 600 lines. The pace is that of these lines."""
_LARGEST_WINDOW = 16 << 20
"""The window grows to this size as long as it has neither: a line with the user's code may be large."""


@record(kw_only=True)
class Latest:
    """The latest records of a run. An event is empty if the end of the file has none."""

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
        """The newest figures of the run; NOTHING without the file.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            with open_regular(self._path) as file:
                status = os.fstat(file.fileno())
                # A resume replaces the file.
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._latest = status.st_ino, NOTHING
                    self._offset = self._open(file.fileno(), status.st_size)
                self._take_all(self._added(file.fileno(), status.st_size))
        except FileNotFoundError:
            self._inode, self._offset, self._latest = 0, 0, NOTHING
        return self._latest

    def _open(self, descriptor: int, size: int) -> int:
        """Takes what the window shows of the last attempt. Returns the offset after its last complete line."""
        window = _WINDOW
        while True:
            begin = max(0, size - window)
            data = os.pread(descriptor, size - begin, begin)
            end = data.rfind(b"\n") + 1
            lines = data[:end].splitlines()
            if self._take_window(lines[1:] if begin else lines) or begin == 0 or window >= _LARGEST_WINDOW:
                return begin + end
            window *= 4

    def _take_window(self, lines: list[bytes]) -> bool:
        """Takes the last start, the first step after it, and the last event of each other kind.

        Decodes few lines, since someone may look at hundreds of runs. Returns whether there is a start or a step.
        """
        began = next(_of_kind("start", lines, reversed(range(len(lines)))), None)
        after = range(began[0] + 1 if began else 0, len(lines))
        first = next(_of_kind("step", lines, after), None)
        kinds = ("step", "evaluation", "checkpoint", "stop")
        last = (next(_of_kind(kind, lines, reversed(after)), None) for kind in kinds)
        newest = next(_events(lines, reversed(range(len(lines)))), None)
        for _, event in sorted(filter(None, (began, first, *last, newest)), key=lambda found: found[0]):
            self._take(event)
        return began is not None or first is not None

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
            latest = replaced(latest, stop_reason=str(event.get("reason") or ASKED_TO_STOP))
        self._latest = latest


def _of_kind(kind: str, lines: list[bytes], order: Iterable[int]) -> Iterator[tuple[int, Event]]:
    """The events of a kind and the numbers of their lines, in this order. Other lines are hardly decoded."""
    word = f'"{kind}"'.encode()
    found = _events(lines, (index for index in order if word in lines[index]))
    return ((index, event) for index, event in found if event["event"] == kind)


def _events(lines: list[bytes], order: Iterable[int]) -> Iterator[tuple[int, Event]]:
    return ((index, event) for index in order if (event := decode(lines[index])) is not None)
