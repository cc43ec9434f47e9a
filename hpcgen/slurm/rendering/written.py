"""Finds the line of a template that wrote a line of a script."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_COMMENT = re.compile(r"(?<!\$)\{#.*?#\}", re.DOTALL)
MOST_COMMON = 3
"""Characters that a line needs to be told from others: fi, done and } are in every template."""


class TemplateLines:
    """The lines of templates; each file is read once."""

    def __init__(self) -> None:
        self._lines: dict[Path, list[str]] = {}

    def find(self, text: str, sources: Iterable[Path]) -> tuple[Path, int] | None:
        """The file and line that wrote `text`, a stripped line of a script: the most literal match.

        None when no line can have written it, or several can.
        """
        best: list[tuple[Path, int]] = []
        most = MOST_COMMON
        for path in sources:
            if path not in self._lines:
                text_of_file = path.read_text(encoding="utf-8")
                # a comment writes no line
                code = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text_of_file)
                self._lines[path] = code.splitlines()
            for number, line in enumerate(self._lines[path], 1):
                literal = _literal(line.strip(), text)
                if literal > most:
                    best, most = [], literal
                if literal == most:
                    best.append((path, number))
        return best[0] if len(best) == 1 else None


def _literal(template_line: str, text: str) -> int:
    """How many characters a template's line gives to a line of a script; 0 when it cannot have written it."""
    literals = re.split(r"\{\{.*?\}\}|\{%.*?%\}", template_line)
    could = re.fullmatch(".*".join(re.escape(literal) for literal in literals), text)
    return len("".join(literals)) if could else 0
