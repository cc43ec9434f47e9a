"""What a run file cannot say, and the sections that it can."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpcgen.lint.words import Word

Sections = dict[str, Any]
"""Part of a run file as plain data."""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Something of the script that is not in the run file."""

    line: int
    what: str
    why: str


@dataclass
class Carried:
    """What was carried over so far, and what was not."""

    sections: Sections = field(default_factory=dict)
    leftovers: list[Leftover] = field(default_factory=list)

    def put(self, path: str, value: object) -> None:
        """Sets the value at a dotted path."""
        *sections, key = path.split(".")
        place = self.sections
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value

    def get(self, path: str) -> Any:
        """The value at a dotted path; None when there is none."""
        place: Any = self.sections
        for key in path.split("."):
            place = place.get(key) if isinstance(place, dict) else None
        return place

    def leave(self, line: int, what: str, why: str) -> None:
        """Says what is not carried over."""
        self.leftovers.append(Leftover(line=line, what=what, why=why))


def unknown(word: Word) -> str:
    """Why a word's value cannot be carried over."""
    if not word.certain:
        return "it is only given under a condition"
    return f"only the job knows its value ({word.text})"
