"""Parses scripts with placeholders, which users of a template fill in: {{ name }}, {% if %} and <name>.

Before parsing, each placeholder is replaced by a name of the same length, so that it is one word.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hpcgen.check.lint.syntax import Node, ShellSyntaxError, parse

BRACES = re.compile(r"\{\{.*?\}\}|\{%.*?%\}")
"""Placeholders in Jinja syntax, each on one line."""
ANGLES = re.compile(r"(?<!<)<[A-Za-z](?:[\w .-]*\w)?>")
ANY = re.compile(f"{BRACES.pattern}|{ANGLES.pattern}")
MASK = re.compile(r"_Z_*Z_")

_TAGS = re.compile(r"[ \t]*(?:(?:\{%.*?%\}|\{#.*?#\})[ \t]*)+")


def is_tag(line: str) -> bool:
    """True if a line contains only tags such as {% if %}, which produce no text."""
    return _TAGS.fullmatch(line) is not None


def masked(text: str, places: re.Pattern[str] = BRACES) -> str:
    """`text` with its placeholders masked, with the same number of bytes. Lines of tags become blank.

    A text that already contains names like the masks is not changed.
    """
    if not places.search(text) or MASK.search(text):
        return text
    lines = (" " * len(line.encode(errors="replace")) if is_tag(line) else line for line in text.split("\n"))
    return places.sub(_mask, "\n".join(lines))


def unmasked(masked: bytes, text: str, places: re.Pattern[str] = BRACES) -> bytes:
    """`masked` with the placeholders of the original `text` restored."""
    lines = (line for line in text.split("\n") if not is_tag(line))
    found = iter(places.findall("\n".join(lines)))
    return re.sub(
        MASK.pattern.encode(), lambda mask: next(found, mask[0].decode()).encode(errors="replace"), masked
    )


def parts(masked: str, original: str, places: re.Pattern[str]) -> list[tuple[str, bool]]:
    """Splits a text at its masks. Returns the parts of `original`, each with True if it is plain text."""
    found = iter(places.findall(original))
    split = re.split(f"({MASK.pattern})", masked)
    return [
        (next(found, part), False) if index % 2 else (part, True) for index, part in enumerate(split) if part
    ]


def _mask(place: re.Match[str]) -> str:
    return f"_Z{'_' * (len(place[0].encode(errors='replace')) - 4)}Z_"


class Parsed(NamedTuple):
    """The tree of a text, the bytes that its offsets count, and the pattern of its placeholders."""

    tree: Node
    source: bytes
    places: re.Pattern[str]
    error: ShellSyntaxError | None = None
    """The error for a <name> that is left in a script: bash refuses it, but the tree has it as a word."""


def parse_template(text: str, *, is_script: bool) -> Parsed:
    """Parses a script, or the text of a `bash -c`, with placeholders as words of unknown value.

    A <name> is a placeholder only if bash refuses the script because of it. In the text of a `bash -c`, a <NAME OF
    SEVERAL WORDS> is a placeholder as well, because bash would use the next option as a file.
    """
    places = BRACES if is_script or not _SEVERAL_WORDS.search(text) else ANY
    error = None
    try:
        tree, source = parse(masked(text, places))
    except ShellSyntaxError as refusal:
        error = None if refusal.is_ours else _placeholder(text, refusal.line)
        if error is None:
            raise
        places = ANY
        try:
            tree, source = parse(masked(text, places))
        except ShellSyntaxError:
            raise refusal from None
    return Parsed(tree, unmasked(source, text, places), places, error if is_script else None)


_SEVERAL_WORDS = re.compile(r"(?<!<)<[A-Z]{2,} [\w .-]*\w>")


def _placeholder(text: str, line: int) -> ShellSyntaxError | None:
    """The error for a <name> on a line that bash refuses; None if the line has no <name>."""
    lines = text.split("\n")
    found = ANGLES.search(lines[line - 1]) if 0 < line <= len(lines) else None
    reason = "is a placeholder that bash reads as a redirection"
    return ShellSyntaxError(line, f"`{found[0]}` {reason}", is_placeholder=True) if found else None
