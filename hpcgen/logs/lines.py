"""Lines of a log: the rank that wrote one, its time, and its text without the prefixes of launchers."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_LABEL = re.compile(r"[ 0]{0,7}(\d{1,7}):(?: |$)")
"""Prefix of `srun --label`."""
_PREFIX = re.compile(
    r"\s*(?:"
    r"\[(?:rank|Rank )(?P<torch>\d{1,7})\]:? ?"  # torch
    r"|\[\d+,(?P<mpi>\d{1,7})\](?:<std(?:err|out)>)?:? ?"  # mpirun --tag-output
    r"|\[(?:default|local_rank_?)\d+\]:? ?"  # torchrun: a rank within its node
    r"|(?:\x1b\[\d+m)?\(\w+(?: \w+)* pid=\d+(?:, ip=[\d.]+)?\)(?:\x1b\[0m)? ?"  # Ray
    r")"
)
_PREFIX_STARTS = ("[", "(", "\x1b")
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_STAMP = re.compile(
    r"[\[(]?(?P<date>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](?P<fraction>\d{1,9}))?(?P<zone>Z|[+-]\d\d:?\d\d)?[\])]?"
)
_STAMP_BEFORE = 40
"""A time further to the right belongs to the message."""


class Line(NamedTuple):
    """One line of a log."""

    rank: int | None
    time: float | None
    """Unix time (seconds) in the line. None without one."""
    text: str
    """The line without the prefixes of launchers."""
    number: int
    """Position in the file, from 1 or from the start of what was read."""


def parse(lines: Iterable[str], rank: int | None = None, first: int = 1) -> Iterator[Line]:
    """Parses the lines of a file. `rank` is the rank whose own log this is."""
    for number, line in enumerate(lines, first):
        yield parse_line(line, rank, number)


def parse_line(line: str, rank: int | None = None, number: int = 1) -> Line:
    """Parses a line. A rank in its prefix replaces `rank`."""
    text = line.rstrip("\r\n")
    if "\x1b" in text:
        text = _COLOR.sub("", text)
    if label := _LABEL.match(text):
        rank, text = int(label[1]), text[label.end() :]
    while text.lstrip()[:1] in _PREFIX_STARTS and (found := _PREFIX.match(text)):
        named = found["torch"] or found["mpi"]
        rank = int(named) if named else rank
        text = text[found.end() :]
    text = text.rpartition("\r")[2]  # what a terminal shows of a progress bar
    return Line(rank, time_of(text), text, number)


def time_of(text: str) -> float | None:
    """The time at the beginning of a line. A time without a zone is local."""
    if "20" not in text[: _STAMP_BEFORE + 4]:  # the century; most lines have no time
        return None
    if not (stamp := _STAMP.search(text, 0, _STAMP_BEFORE + 30)) or stamp.start() > _STAMP_BEFORE:
        return None
    zone = (stamp["zone"] or "").replace("Z", "+00:00")
    if zone and ":" not in zone:
        zone = f"{zone[:3]}:{zone[3:]}"
    try:
        time = datetime.datetime.fromisoformat(stamp["date"] + zone).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    return time + float(f"0.{stamp['fraction'] or 0}")


def without_time(text: str) -> str:
    """A line without the time with which it begins."""
    stamp = _STAMP.match(text)
    return text[stamp.end() :].lstrip() if stamp else text
