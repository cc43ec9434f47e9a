"""Log files of a job, and the part of them that shows the end of one attempt. A log can have gigabytes."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from hpcgen.runs.attempts import JobAttempt
from trainer.contract.files.regular_file import open_regular
from trainer.contract.files.shared_files import foreign_link
from trainer.contract.record import record

WINDOW_BYTES = 64 << 20
"""Largest part of a job's logs that is read to find a failure, from the last steps on."""
END_BYTES = 4 << 20
"""Largest part of the end that is read in addition, if the failure is longer than WINDOW_BYTES."""
_BLOCK_BYTES = 1 << 20
_LINE_BYTES = 1 << 10
"""Longest distance of a text from the start and the end of its line."""
_FIRST_LINE = re.compile(rb"hpcgen: .*, restart (\d{1,9}), on ")
_JOB_LOG = re.compile(r"(?P<stage>[a-z][a-z-]*)-(?P<job>\d+(?:_\d+)?)\.log")
_STEP = re.compile(rb"\biteration \d{1,15}/\d{1,15}: loss ")
_STARTS_RANKS = re.compile(
    rb"hpcgen: (?:rendezvous at \S+, world size \d|continuing in this job, on "
    rb"|the step ended with status \d+ after progress to \d+: starting it again in this job)"
)
"""Words of the batch script when it starts the ranks, or starts them again (templates/lib/ranks.sh, attempts.sh,
preflight.sh): the attempt survived what came before."""
_STEPS_BEFORE = 3
"""The line of a rank that failed can come before those of rank 0 for the same steps."""
_TASK_LOG = re.compile(r"_(\d{1,7})_log\.out$")


@record(kw_only=True)
class LogFile:
    """A log of a job."""

    path: Path
    rank: int | None = None
    """The rank whose own log this is. None for the job's log, which has the lines of all ranks."""

    @property
    def name(self) -> str:
        """Path below the run directory, for messages."""
        parent = self.path.parent.name
        return f"{parent}/{self.path.name}" if self.rank is not None else self.path.name


def log_files(run_dir: Path, attempt: JobAttempt) -> tuple[LogFile, ...]:
    """The existing logs of an attempt's job: its own, then those that submitit keeps for each task."""
    first = Path("submitit", f"{attempt.job}_0_log.out")
    for event in attempt.events:
        if log := event.get("log"):  # of a job on this machine
            first = Path(log)
    if first.is_absolute() or ".." in first.parts:  # others may have written the event
        first = Path(first.name)
    job = _TASK_LOG.sub("", first.name)
    tasks = [
        LogFile(path=path, rank=int(found[1]))
        for path in (run_dir / first.parent).glob(f"{glob.escape(job)}_*_log.out")
        if (found := _TASK_LOG.search(path.name)) and path.name == f"{job}{found[0]}"
    ]
    tasks.sort(key=lambda file: file.rank or 0)
    own = LogFile(path=run_dir / f"{attempt.stage}-{attempt.job}.log")
    return tuple(file for file in (own, *tasks) if _is_readable(file.path, run_dir))


def attempts_without_events(run_dir: Path, known: Collection[str]) -> list[JobAttempt]:
    """An attempt for each log of a job that recorded no events, such as one of hpcgen 0.2.0: its newest attempt."""
    found = []
    for path in run_dir.glob("*.log"):
        name = _JOB_LOG.fullmatch(path.name)
        if name is None or name["job"] in known or not _is_readable(path, run_dir):
            continue
        with contextlib.suppress(OSError), open_regular(path) as file:
            end = file.seek(0, os.SEEK_END)
            start = _last_line_with(file, b", restart ", _FIRST_LINE, 0, end)
            began = _FIRST_LINE.search(_read(file, start or 0, (start or 0) + _LINE_BYTES))
            found.append(
                JobAttempt(
                    job=name["job"],
                    restart=int(began[1]) if began and start is not None else 0,
                    stage=name["stage"],
                    began=path.stat().st_mtime,
                    events=(),
                )
            )
    return found


def _is_readable(path: Path, run_dir: Path) -> bool:
    return os.access(path, os.R_OK) and path.is_file() and foreign_link(path, run_dir) is None


@record(kw_only=True)
class Part:
    """A part of a log."""

    file: LogFile
    start: int
    """Offset of its first byte."""
    first_line: int
    """Number of its first line. The lines of a very long log are not counted: 0."""
    data: bytes
    is_torn: bool
    """True if it begins within a line."""

    def lines(self) -> Iterator[str]:
        """The lines, decoded."""
        for line in self.data.split(b"\n"):
            yield line.decode(errors="replace")


def failure_parts(
    file: LogFile, attempt: JobAttempt, *, is_last: bool, budget: int = WINDOW_BYTES
) -> list[Part]:
    """The parts of a log that can show why an attempt ended: from its last steps or start of ranks to its end.

    `is_last`: no later attempt has appended to the file.

    Raises:
        OSError: the file cannot be read.
    """
    with open_regular(file.path) as opened:
        begin, end = attempt_range(opened, attempt.restart, is_last=is_last)
        start = _before_last_steps(opened, begin, end)
        if start is None:
            start = max(begin, end - budget)
        start = _last_line_with(opened, b"hpcgen: ", _STARTS_RANKS, start, end) or start
        spans = [(start, min(end, start + budget))]
        if spans[0][1] < end:
            spans.append((max(spans[0][1], end - min(END_BYTES, budget)), end))
        return [
            Part(
                file=file,
                start=first,
                first_line=_line_number(opened, first),
                data=_read(opened, first, last),
                is_torn=first > 0 and _read(opened, first - 1, first) != b"\n",
            )
            for first, last in spans
        ]


def attempt_range(file: BinaryIO, restart: int, *, is_last: bool) -> tuple[int, int]:
    """Where an attempt begins and ends in the job's log, to which each attempt appends."""
    end = file.seek(0, os.SEEK_END)
    if not is_last and (following := _last_line_with(file, _begins(restart + 1), _FIRST_LINE, 0, end)):
        end = following
    if restart == 0:  # the log of a job begins with its first attempt
        return 0, end
    return _last_line_with(file, _begins(restart), _FIRST_LINE, 0, end) or 0, end


def _begins(restart: int) -> bytes:
    """Words in the first line of an attempt, which the batch script prints."""
    return b", restart %d, on " % restart


def _before_last_steps(file: BinaryIO, begin: int, end: int) -> int | None:
    """Offset of the third-last line of a step; None without a step."""
    found: int | None = None
    for _ in range(_STEPS_BEFORE):
        earlier = _last_line_with(file, b"iteration ", _STEP, begin, end if found is None else found)
        if earlier is None:
            break
        found = earlier
    return found


def _last_line_with(
    file: BinaryIO, text: bytes, pattern: re.Pattern[bytes], begin: int, end: int
) -> int | None:
    """Offset of the last line between two offsets that contains a text and a pattern, read from the end."""
    last = end
    while last > begin:
        first = max(begin, last - _BLOCK_BYTES)
        start = max(begin, first - _LINE_BYTES)
        data = _read(file, start, min(end, last + _LINE_BYTES))
        position = last - start
        while (position := data.rfind(text, first - start, position)) >= 0:
            line_start = data.rfind(b"\n", 0, position) + 1
            line_end = data.find(b"\n", position)
            if pattern.search(data, line_start, len(data) if line_end < 0 else line_end):
                return start + line_start
        last = first
    return None


def _read(file: BinaryIO, first: int, last: int) -> bytes:
    file.seek(first)
    return file.read(max(0, last - first))


def _line_number(file: BinaryIO, offset: int) -> int:
    """Number of the line that begins at an offset; 0 if that would mean reading too much."""
    if offset > WINDOW_BYTES:
        return 0
    return _read(file, 0, offset).count(b"\n") + 1
