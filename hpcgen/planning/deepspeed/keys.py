"""All keys that DeepSpeed reads, by section: the table keys.txt, whose beginning explains its rows."""

from __future__ import annotations

from pathlib import Path

from hpcgen.planning.deepspeed.types import Key, Section, parsed

SECTIONS: dict[str, Section] = {}
"""Sections by their dotted paths. The top level is "", and optimizer:TYPE has the parameters of a type."""
REMOVED: dict[str, dict[str, str]] = {}
"""Section -> key that DeepSpeed refuses (runtime/config.py, _reject_removed_config_keys) -> what to do."""
RENAMED: dict[str, str] = {}
"""Key of older versions and documents -> current key."""
STAGE3 = "[stage3_]"
STAGE3_KEYS: list[str] = []
"""Keys for stage 3 of ZeRO. Each has an alias that begins with stage3_."""


def _read(table: str) -> None:
    paths: list[str] = []
    for line in table.splitlines():
        name, type_, note = (*line.split("\t"), "", "")[:3]
        if line.startswith("#") or not line:
            continue
        if name.endswith("]"):
            paths = name[1:-1].split(", ")
            for path in paths:
                _add_section(path, source=type_, options=note.split())
        else:
            for path in paths:
                _add_key(path, name, type_, note)


def _add_section(path: str, source: str, options: list[str]) -> None:
    section = Section({}, source, nullable="null" in options, open="open" in options)
    section = SECTIONS.setdefault(path, section)
    parent, _, name = path.rpartition(".")
    if path and ":" not in path:
        SECTIONS[parent].keys[name] = section


def _add_key(path: str, name: str, type_: str, note: str) -> None:
    if type_ == "removed":
        REMOVED.setdefault(path, {})[name] = note
    elif type_ == "renamed":
        RENAMED[name] = note
    elif type_ == "deprecated":
        SECTIONS[path].keys[name] = Key(parsed("anything"), deprecated=note)
    else:
        words = note.split()
        key = Key(parsed(type_), auto="auto" in words, nullable="null" in words, required="required" in words)
        plain = name.removeprefix(STAGE3)
        SECTIONS[path].keys[plain] = key
        if plain != name:
            STAGE3_KEYS.append(plain)
            SECTIONS[path].keys[f"stage3_{plain}"] = key


_read(Path(__file__).with_name("keys.txt").read_text(encoding="utf-8"))


def parameters(what: str) -> dict[str, Section]:
    """The sections of the parameters of each type of optimizer, or of scheduler."""
    return {
        path.removeprefix(f"{what}:"): section
        for path, section in SECTIONS.items()
        if path.startswith(f"{what}:")
    }
