"""Finds the line of a template that wrote a line of a script."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_COMMENT = re.compile(r"(?<!\$)\{#.*?#\}", re.DOTALL)
MOST_COMMON = 3
"""Lines with at most this many literal characters are not identifiable: fi and } are in every template."""


class TemplateLines:
    """The lines of templates. Each file is read once."""

    def __init__(self) -> None:
        self._lines: dict[Path, list[str]] = {}

    def find(self, text: str, sources: Iterable[Path]) -> tuple[Path, int] | None:
        """The file and line that wrote `text`, a stripped line of a script: the match with the most literal characters.

        None if no line matches, or several match equally well.
        """
        best: list[tuple[Path, int]] = []
        most = MOST_COMMON
        for path in sources:
            if path not in self._lines:
                text_of_file = path.read_text(encoding="utf-8")
                # comments write no lines
                code = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text_of_file)
                self._lines[path] = code.split("\n")
            for number, line in enumerate(self._lines[path], 1):
                literal = _literal(line.strip(), text)
                if literal > most:
                    best, most = [], literal
                if literal == most:
                    best.append((path, number))
        return best[0] if len(best) == 1 else None


def _literal(template_line: str, text: str) -> int:
    """Number of literal characters of a template line that match a script line; 0 if the line does not match."""
    literals = re.split(r"\{\{.*?\}\}|\{%.*?%\}", template_line)
    could = re.fullmatch(".*".join(re.escape(literal) for literal in literals), text)
    return len("".join(literals)) if could else 0
