"""Lines of a job's logs in the order in which they were written, from their end or while they grow."""

from __future__ import annotations

import contextlib
import heapq
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

from hpcgen.logs.lines import Line, parse
from hpcgen.runs.attempts import JobAttempt
from hpcgen.runs.log_files import WINDOW_BYTES, LogFile, attempt_range
from trainer.contract.files.regular_file import open_regular

_FIRST_WINDOW_BYTES = 256 << 10
_READ_BYTES = 4 << 20
"""Most that is read of a file at a time while it grows."""
_LONGEST_LINE = 1 << 20
"""A longer line is shown in pieces."""


class Entry(NamedTuple):
    """A line with its place in the order."""

    time: float
    """Time of the line, or of the last line before it with a time (Unix time in seconds). Lines at the end of a file
    that have no time were written until its last change."""
    file_number: int
    file: LogFile
    line: Line


def last_lines(
    files: Sequence[LogFile],
    attempt: JobAttempt,
    count: int,
    *,
    is_last: bool,
    shows: Callable[[Line], bool] = lambda line: True,
) -> list[Entry]:
    """The last lines of an attempt in time order, of those that `shows` chooses.

    The lines of a file keep their order, also those without a time.
    """
    each_file = [
        _entries(
            number, file, *_last_lines_of(file, attempt, count, is_last=is_last, shows=shows), attempt.began
        )
        for number, file in enumerate(files)
    ]
    return list(deque(merged(each_file), maxlen=count))


def merged(each_file: Iterable[Iterable[Entry]]) -> Iterator[Entry]:
    """Entries of several files in time order."""
    return heapq.merge(*each_file, key=lambda entry: (entry.time, entry.file_number))


def _entries(
    number: int, file: LogFile, lines: Sequence[Line], changed: float | None, began: float
) -> Iterator[Entry]:
    """`changed`: time of the file's last change, if it ends with these lines."""
    latest = began
    last_timed = max((index for index, line in enumerate(lines) if line.time), default=-1)
    for index, line in enumerate(lines):
        latest = max(latest, line.time or latest)
        yield Entry(latest if index <= last_timed else max(latest, changed or latest), number, file, line)


def _last_lines_of(
    file: LogFile, attempt: JobAttempt, count: int, *, is_last: bool, shows: Callable[[Line], bool]
) -> tuple[list[Line], float | None]:
    """The last lines in one file, and when they were written if it ends with them. Reads more of it until there are
    enough."""
    try:
        opened = open_regular(file.path)
    except OSError:  # it was removed meanwhile
        return [], None
    with opened:
        begin, end = attempt_range(opened, attempt.restart, is_last=is_last)
        status = os.fstat(opened.fileno())
        changed = status.st_mtime if end >= status.st_size else None
        window = _FIRST_WINDOW_BYTES
        while True:
            start = max(begin, end - window)
            opened.seek(start)
            data = opened.read(end - start).decode(errors="replace").removesuffix("\n").split("\n")
            if start > begin:
                data = data[1:]  # a part of a line
            found = list(filter(shows, parse(data, file.rank)))
            if len(found) >= count or start == begin or window >= WINDOW_BYTES:
                return (found[-count:] if count else []), changed
            window *= 4


class Follower:
    """Follows the logs of a run across requeues, new jobs, truncation and rotation.

    `find_files` names the files to follow at this moment.
    """

    def __init__(self, find_files: Callable[[], Sequence[LogFile]], began: float) -> None:
        """Begins at the end of the files that exist."""
        self._find_files = find_files
        self._began = began
        self._growing: dict[LogFile, _Growing] = {}
        for file in find_files():
            self._growing[file] = _Growing(file, at_end=True)

    def poll(self) -> list[Entry]:
        """The complete lines that were added since the last call, in time order."""
        for file in self._find_files():
            if file not in self._growing:
                self._growing[file] = _Growing(file, at_end=False)
        each_file = [
            list(_entries(number, file, list(parse(growing.new_lines(), file.rank)), None, self._began))
            for number, (file, growing) in enumerate(self._growing.items())
        ]
        found = list(merged(each_file))
        if found:
            self._began = found[-1].time
        return found

    def close(self) -> None:
        """Closes the files."""
        for growing in self._growing.values():
            growing.close()


class _Growing:
    """One file that grows."""

    def __init__(self, file: LogFile, *, at_end: bool) -> None:
        self._path = file.path
        self._rest = b""
        self._file: BinaryIO | None = None
        self._open()
        if at_end and self._file is not None:
            self._file.seek(0, os.SEEK_END)

    def new_lines(self) -> list[str]:
        """Complete lines that were added. If another file has the name, the old one is read to its end first."""
        data = self._rest + self._read()
        if self._is_replaced():
            self._open()
            data = self._whole(data) + self._read()
        elif self._is_truncated():
            assert self._file is not None
            self._file.seek(0)
            data = self._whole(data) + self._read()
        complete, newline, self._rest = data.rpartition(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            complete, newline, self._rest = complete + newline + self._rest, b"\n", b""
        return complete.decode(errors="replace").split("\n") if newline else []

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        self.close()
        self._file = None
        with contextlib.suppress(OSError):
            self._file = open_regular(self._path)

    def _read(self) -> bytes:
        if self._file is None:
            return b""
        try:
            return self._file.read(_READ_BYTES)
        except OSError:  # a stale file handle: the file is opened again below
            return b""

    def _is_replaced(self) -> bool:
        try:
            named = self._path.stat()
        except OSError:
            return False
        if self._file is None:
            return True
        with contextlib.suppress(OSError):
            opened = os.fstat(self._file.fileno())
            return (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino)
        return True

    def _is_truncated(self) -> bool:
        with contextlib.suppress(OSError):
            return self._file is not None and os.fstat(self._file.fileno()).st_size < self._file.tell()
        return False

    @staticmethod
    def _whole(data: bytes) -> bytes:
        """The rest of an old file as complete lines."""
        return data if not data or data.endswith(b"\n") else data + b"\n"
