"""Unknown keys: the message, and the key that was probably meant."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hpcgen.config import spellings
from hpcgen.config.type_hints import key_paths, section_of
from hpcgen.errors import Problem
from hpcgen.text import did_you_mean, nearest, one_of
from trainer.contract.config import field_hints

TRANSLATED_SECTIONS = ("model", "parallelism", "training", "optimizer", "data", "checkpoint", "logging")
"""Sections of a run file whose keys have other names in other training programs."""
TYPO = 0.8
"""Minimum similarity of a misspelled key to the right one (difflib ratio)."""
MOST_LISTED = 24
"""Longest list of keys in a hint."""
MOST_PLACES = 3
"""Keys of the same name in more sections are not suggested."""


def unknown_key(cls: type, path: str, names: Sequence[str]) -> Problem:
    """The problem of a key that its section, of a document that describes `cls`, does not have.

    The hint is the first of these that exists: the key in other letters; the section that has the key; the key that
    has this name in another program; keys of the section with a very similar spelling; the key of another level; a key
    of another section with a very similar spelling; keys of the section with a similar spelling; what other programs
    mean by names that begin like this; all keys of the section.
    """
    *section, name = names
    known = sorted(field.name for field in dataclasses.fields(section_of(cls, section)))
    plain = name.lstrip("-").replace("-", "_").lower()
    inside = path.removesuffix(name)
    if plain in known:
        return _problem(path, f"use {inside}{plain}", inside + plain)
    if found := _places(cls, plain):
        return _elsewhere(path, plain, found)
    is_translated = "model" in field_hints(cls) and (not section or section[0] in TRANSLATED_SECTIONS)
    if is_translated and spellings.is_known(plain):
        return _problem(path, spellings.answer(plain), spellings.key(plain))
    if near := nearest(plain, known, TYPO):
        return _problem(path, did_you_mean(plain, known), inside + near)
    if found := _deeper_places(cls, plain):
        return _elsewhere(path, plain, found)
    if is_translated and (elsewhere := _similar_elsewhere(cls, plain)):
        return _problem(path, f"did you mean {elsewhere}?", elsewhere)
    if near := nearest(plain, known):
        return _problem(path, did_you_mean(plain, known), inside + near)
    if is_translated and (answer := spellings.answer(plain)):
        return _problem(path, answer, "")
    advice = (
        f"known keys are {', '.join(known)}" if len(known) <= MOST_LISTED else "hpcgen init lists all keys"
    )
    if "extra_directives" in known:
        advice += "; for other options of sbatch, use extra_directives"
    return _problem(path, advice, "")


def _problem(path: str, hint: str, meant: str) -> Problem:
    return Problem(path, "is not a known key", hint, meant=meant)


def _elsewhere(path: str, name: str, found: Sequence[str]) -> Problem:
    inner, _, last = found[0].rpartition(".")
    hint = f"write {last} in the section {inner}" if "." in name else f"use {one_of(found)}"
    return _problem(path, hint, found[0])


def _places(cls: type, name: str) -> list[str]:
    """The paths of a key at the top level or, if there is none, in the sections of the trainer."""
    keys = [key for key in key_paths(cls) if f".{key}".endswith(f".{name}")]
    if name in keys:
        return [name]
    return [key for key in keys if key.count(".") == 1 and key.partition(".")[0] in TRANSLATED_SECTIONS]


def _similar_elsewhere(cls: type, name: str) -> str | None:
    """The path of a key in the sections of the trainer with a very similar spelling."""
    paths = {key.partition(".")[2]: key for key in key_paths(cls) if key.startswith(TRANSLATED_SECTIONS)}
    near = nearest(name, paths, TYPO)
    return paths[near] if near else None


def _deeper_places(cls: type, name: str) -> list[str]:
    """The paths of a key in all sections; only slurm.train's for a setting of all stages. Empty if there are many."""
    keys = [key for key in key_paths(cls) if f".{key}".endswith(f".{name}")]
    keys = [key for key in keys if key.startswith("slurm.train.")] or keys
    return keys if len(keys) <= MOST_PLACES else []
