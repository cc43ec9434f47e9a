"""A script's lines, each with what bash or sbatch makes of it: a command, a directive, a comment, a document's text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hpcgen.rendering.shell_reader import ShellError, ShellReader

Kind = Literal["code", "words", "quoted", "directive", "comment", "text"]
"""What a line begins in. words: an array whose parentheses have lines of their own. quoted: a text in quotes that
began before, which may be a program for other shells. text: a here-document.
"""

_QUOTES = ("'", "$'", '"')
_ARRAY = re.compile(r"(?:^|\s)\w+\+?=\($")


@dataclass(frozen=True)
class Line:
    """One line of a script."""

    number: int
    text: str
    kind: Kind
    code: str = ""
    """Of code, words and what is quoted: the text, without a comment behind it."""


def script_lines(script: str) -> tuple[Line, ...]:
    """The lines of a script; from where its quoting cannot be followed, a line is what it looks like."""
    return tuple(_read(script))


def _read(script: str) -> Iterator[Line]:
    reader, in_array = ShellReader(), False
    for number, text in enumerate(script.split("\n"), 1):
        kind = _kind(reader, text)
        code = text[: _comment_start(reader, text)].rstrip() if kind in ("code", "quoted") else ""
        in_array = in_array and code.strip() != ")"
        yield Line(number, text, "words" if in_array and kind == "code" else kind, code)
        in_array = in_array or (kind == "code" and bool(_ARRAY.search(code)))
        try:
            reader.feed(text + "\n")
        except ShellError:
            reader = ShellReader()


def _kind(reader: ShellReader, text: str) -> Kind:
    if reader.inside == "<<":
        return "text"
    if reader.at_line_start:
        if text.startswith("#SBATCH"):
            return "directive"
        if not text.strip() or text.lstrip().startswith("#"):
            return "comment"
    return "quoted" if reader.inside in _QUOTES else "code"


def _comment_start(reader: ShellReader, text: str) -> int:
    for found in re.finditer(r"(?<=\s)#", text):
        ahead = reader.copy()
        try:
            ahead.feed(text[: found.end()])
        except ShellError:
            break
        if ahead.inside == "#":
            return found.start()
    return len(text)
