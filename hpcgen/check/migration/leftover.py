"""The sections of a run file, and parts of a script that it cannot express."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcgen.check.lint.words import Word

Sections = dict[str, Any]
"""Sections of a run file as plain data."""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A part of the script that is not in the run file."""

    line: int
    what: str
    why: str
    decides: bool = False
    """True if the results of the training depend on it. If so, no run file is written unless one of `keys` is set."""
    keys: tuple[str, ...] = ()
    """Keys of the run file that resolve it; empty if the script must be changed."""


@dataclass
class Carried:
    """Carried sections and leftovers so far."""

    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Values from the command line, which override the script's."""
    sections: Sections = field(default_factory=dict)
    leftovers: list[Leftover] = field(default_factory=list)
    usual: list[str] = field(default_factory=list)
    """Names of options that request what the trainer does by default."""
    without_effect: list[str] = field(default_factory=list)
    """Options without a key that do not affect the results."""
    own: list[str] = field(default_factory=list)
    """Parts that hpcgen's script sets for itself in any case."""
    _claimed: list[object] = field(default_factory=list)

    def claim(self, *things: object) -> None:
        """Notes the parts of the script that are carried over, listed or refused. Lists parts that nothing claims."""
        self._claimed += things

    def is_claimed(self, thing: object) -> bool:
        """True if something has claimed this very part."""
        return any(thing is claimed for claimed in self._claimed)

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
        """The value at a dotted path, from the command line or else the script; None if neither sets it."""
        return _at(self.chosen, path) if self.is_chosen(path) else _at(self.sections, path)

    def is_chosen(self, path: str) -> bool:
        """True if the command line sets this key, a part of it, or its section."""
        place: Any = self.chosen
        for key in path.split("."):
            if not isinstance(place, Mapping):
                return True
            if key not in place:
                return False
            place = place[key]
        return True

    def leave(self, line: int, what: str, why: str) -> None:
        """Adds a leftover that the results do not depend on."""
        self.leftovers.append(Leftover(line=line, what=what, why=why))

    def refuse(self, line: int, what: str, why: str, *keys: str) -> None:
        """Adds a leftover that the results depend on, unless the command line sets one of `keys`."""
        if not any(self.is_chosen(key) for key in keys):
            self.leftovers.append(Leftover(line=line, what=what, why=why, decides=True, keys=keys))


def _at(place: Any, path: str) -> Any:
    for key in path.split("."):
        place = place.get(key) if isinstance(place, Mapping) else None
    return place


def is_sure(word: Word | None) -> bool:
    """True if a word is known and certainly given."""
    return word is not None and word.known and word.certain


def unknown(word: Word) -> str:
    """The reason why a word's value cannot be carried over."""
    if not word.certain:
        return "it depends on a condition that is only known in the job"
    text = " ".join(word.text.split())
    return f"its value is only known in the job ({text if len(text) <= 80 else text[:77] + '...'})"
