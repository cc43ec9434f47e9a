"""Collects from the lines of a log what speaks for a failure: tracebacks, and single lines with a signature."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

from hpcgen.logs.lines import Line, without_time
from hpcgen.logs.signatures import Match, Role, is_exception, match_exception, match_line
from trainer.contract.record import record

MAX_TRACEBACK_LINES = 400
"""A longer traceback, such as that of an endless recursion, is cut in the middle of its frames."""
MAX_MESSAGE_LINES = 40
"""Lines after the first one of a message that belong to it, such as torchrun's table of failures."""
LAST_LINES = 10
"""Lines of a rank that are kept in case it ends without a traceback."""

_START = re.compile(r"^(?P<indent>.*?)(?:Original )?Traceback \(most recent call last\)(?::\s*$| ?─)")
_FRAME = re.compile(r"^(?:\s|[│╭╰❱]|$)")
"""A line of a frame: Python's are indented, rich draws a box around them."""
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:: |:$|$)")
_CHAIN = re.compile(r"^(?:During handling of the above exception|The above exception was the direct cause)")
_HOST = re.compile(r"(?P<node>[A-Za-z][\w-]*\d[\w.-]*): ")
"""The node before each line, as pdsh prints it."""
_IGNORED = re.compile(r"^Exception ignored in")
"""Python's line before the traceback of an exception that it ignored."""
_OTHER = re.compile(
    r"^(?:trainer: |hpcgen: |srun: |slurmstepd|iteration \d|\d{4}-\d\d-\d\d[T ]|(?:WARNING|ERROR|INFO):|[EWI]\d{4} )"
)
"""Lines that begin something else than a part of a message."""
_KNOWN: tuple[Role, ...] = ("fact", "root", "stop", "exit", "wait", "cascade")


@record(kw_only=True)
class Evidence:
    """One observation of a failure."""

    kind: str
    role: Role
    order: int
    """Position in the log, across all its files."""
    rank: int | None
    ranks: tuple[int, ...] = ()
    """Failed ranks that the text names."""
    node: str | None = None
    time: float | None = None
    message: str
    traceback: str = ""
    """The traceback, or the last lines of a rank whose process ended without one."""
    source: str = ""
    """Name of the file."""
    number: int = 0
    """Line number in the file."""


def collect(lines: Iterable[Line], source: str = "", start: int = 0) -> Iterator[Evidence]:
    """The evidence in one file, in the order in which it began. Lines of several ranks may be mixed."""
    open_tracebacks: dict[int | None, _Traceback] = {}
    last_lines: dict[int | None, deque[str]] = defaultdict(lambda: deque(maxlen=LAST_LINES))
    last_time: float | None = None
    for order, line in enumerate(lines, start):
        last_time = line.time or last_time
        earlier = last_lines[line.rank]
        current = open_tracebacks.get(line.rank)
        if current is not None:
            if current.takes(line.text):
                continue
            yield current.evidence(source)
            del open_tracebacks[line.rank]
        if "Traceback" in line.text and (begun := _START.match(line.text)):
            is_ignored = bool(earlier and _IGNORED.match(earlier[-1]))
            open_tracebacks[line.rank] = _Traceback(line, order, last_time, begun["indent"], is_ignored)
        elif is_exception(line.text):
            open_tracebacks[line.rank] = _Traceback(line, order, last_time, None, False)
        elif found := match_line(line.text):
            ended = last_lines.get(found.ranks[0]) if found.role == "exit" and found.ranks else None
            yield Evidence(
                kind=found.kind,
                role=found.role,
                order=order,
                rank=line.rank,
                ranks=found.ranks,
                node=found.node,
                time=last_time,
                message=without_time(line.text).strip(),
                traceback="\n".join(ended or ()),
                source=source,
                number=line.number,
            )
        earlier.append(line.text)
    for current in open_tracebacks.values():
        yield current.evidence(source)


class _Traceback:
    """The lines of a rank from `Traceback` to the end of the exception's message, with those of a chain."""

    def __init__(
        self, first: Line, order: int, time: float | None, indent: str | None, is_ignored: bool
    ) -> None:
        """`indent` is what precedes the word Traceback. None for an exception without a traceback."""
        self._first, self._order, self._time = first, order, time
        self._is_ignored = is_ignored
        self._prefix = indent or ""
        host = _HOST.fullmatch(self._prefix)
        self._node = host["node"] if host else None
        self._lines = [first.text]
        self._exceptions: list[list[str]] = [] if indent is not None else [[first.text]]
        """Each exception of the chain, with the lines of its message."""
        self._is_in_frames = indent is not None
        self._is_chained = False

    def takes(self, text: str) -> bool:
        """Adds a line. Returns False if the line does not belong here."""
        if not self._is_in_frames and not text.startswith(self._prefix):
            return False
        text = text.removeprefix(self._prefix)
        if self._belongs(text):
            if len(self._lines) < MAX_TRACEBACK_LINES or not self._is_in_frames:
                self._lines.append(text)
            return True
        return False

    def _belongs(self, text: str) -> bool:
        if "Traceback" in text and (begun := _START.match(text)):
            if not self._is_in_frames and not self._is_chained and "Original" not in begun[0]:
                return False  # of another exception
            self._is_in_frames, self._is_chained = True, False
            return True
        if _OTHER.match(text) or (not self._is_in_frames and is_exception(text) and not self._announces()):
            return False
        if self._is_in_frames:
            if _FRAME.match(text):
                return True
            self._is_in_frames = False
            self._exceptions.append([text])
            return True
        message = self._exceptions[-1]
        if not text.strip():
            message.append("")
            return len(message) <= MAX_MESSAGE_LINES
        if _CHAIN.match(text):
            self._is_chained = True
            return True
        if message[-1] == "" or len(message) > MAX_MESSAGE_LINES:
            return False
        message.append(text)
        return True

    def _announces(self) -> bool:
        """True if the message ends before the exception that it quotes, as torch.compile's do: `... raised:`."""
        return self._exceptions[-1][-1].endswith(" raised:")

    def evidence(self, source: str) -> Evidence:
        """The exception that explains the chain: the first one with the best known cause, else the last one."""
        texts = ["\n".join(each).strip() for each in self._exceptions] or ["(cut off)"]
        matches = [match_exception(text) for text in texts]
        index = min(range(len(texts)), key=lambda index: _relevance(matches[index], len(texts) - index))
        found = Match("teardown", "cascade") if self._is_ignored else matches[index]
        return Evidence(
            kind=found.kind,
            role=found.role,
            order=self._order,
            rank=self._first.rank,
            ranks=found.ranks,
            node=found.node or self._node,
            time=self._time,
            message=_headline(texts[index]),
            traceback="\n".join(self._lines).rstrip() if len(self._lines) > 1 else "",
            source=source,
            number=self._first.number,
        )


def _relevance(match: Match, from_the_end: int) -> tuple[int, int]:
    """Order of the exceptions of a chain, the most relevant first."""
    if match.kind == "exception":
        return len(_KNOWN), from_the_end
    return _KNOWN.index(match.role), -from_the_end


def _headline(text: str) -> str:
    """The first line of an exception that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    inner = [line for line in lines[1:] if _EXCEPTION.match(line) and ": " in line]
    return inner[-1] if inner and " in DataLoader worker " in lines[0] else lines[0]
