"""What a run file cannot say, and the sections that it can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcgen.check.lint.words import Word

Sections = dict[str, Any]
"""Part of a run file as plain data."""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Something of the script that is not in the run file."""

    line: int
    what: str
    why: str
    decides: bool = False
    """Whether the results of the training depend on it, so that no run file may be written without an answer."""
    keys: tuple[str, ...] = ()
    """Keys of the run file that answer it; none where only another script does."""


@dataclass
class Carried:
    """What was carried over so far, and what was not."""

    chosen: Mapping[str, Any] = field(default_factory=dict)
    """The values that the command line gives, which win over those of the script."""
    sections: Sections = field(default_factory=dict)
    leftovers: list[Leftover] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    """Names of the options that are carried, listed or refused."""
    usual: list[str] = field(default_factory=list)
    """Names of the options that say what the trainer does anyway."""

    def put(self, path: str, value: object) -> None:
        """Sets the value at a dotted path."""
        *sections, key = path.split(".")
        place = self.sections
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value

    def drop(self, path: str) -> None:
        """Removes the value at a dotted path of a section."""
        section, _, key = path.partition(".")
        self.sections.get(section, {}).pop(key, None)
        if not self.sections.get(section, True):
            del self.sections[section]

    def get(self, path: str) -> Any:
        """The value at a dotted path, the chosen one before the script's; None when there is none."""
        return _at(self.chosen, path) if self.is_chosen(path) else _at(self.sections, path)

    def is_chosen(self, path: str) -> bool:
        """Whether the command line gives this key, a part of it, or the section around it."""
        place: Any = self.chosen
        for key in path.split("."):
            if not isinstance(place, Mapping):
                return True
            if key not in place:
                return False
            place = place[key]
        return True

    def leave(self, line: int, what: str, why: str) -> None:
        """Says what is not carried over and does not decide the results."""
        self.leftovers.append(Leftover(line=line, what=what, why=why))

    def refuse(self, line: int, what: str, why: str, *keys: str) -> None:
        """Says what decides the results and cannot be carried over; one of `keys`, when chosen, answers it."""
        if not any(self.is_chosen(key) for key in keys):
            self.leftovers.append(Leftover(line=line, what=what, why=why, decides=True, keys=keys))


def _at(place: Any, path: str) -> Any:
    for key in path.split("."):
        place = place.get(key) if isinstance(place, Mapping) else None
    return place


def is_sure(word: Word | None) -> bool:
    """Whether a word is known, and certainly given."""
    return word is not None and word.known and word.certain


def unknown(word: Word) -> str:
    """Why a word's value cannot be carried over."""
    if not word.certain:
        return "it depends on a condition that only the job resolves"
    text = " ".join(word.text.split())
    return f"only the job knows its value ({text if len(text) <= 80 else text[:77] + '...'})"
