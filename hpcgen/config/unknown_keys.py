"""Unknown keys: the message, and the key that was probably meant."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from hpcgen.config import spellings
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.keys import key_paths, section_of
from hpcgen.config.node_type import NodeType
from hpcgen.config.run import RunConfig
from hpcgen.config.slurm import section_called
from hpcgen.config.spellings import names_in_section, set_by_hpcgen
from hpcgen.errors import FilePlace, Problem
from hpcgen.text import did_you_mean, misspelled, nearest, one_of, short_for
from trainer.contract.config import field_hints

TRANSLATED_SECTIONS = ("model", "parallelism", "training", "optimizer", "data", "checkpoint", "logging")
"""Sections of a run file whose keys have other names in other training programs. Their names are unique, so a key in
the wrong one of these sections is certainly the same key."""
_COMMENTED_HEADING = re.compile(r"# (\w+):\s*(?:#.*)?")
MOST_LISTED = 24
"""Longest list of keys in a hint."""
MOST_PLACES = 3
"""Maximum number of sections to suggest for a key. A key that is in more sections is not suggested."""


def unknown_key(cls: type, path: str, names: Sequence[str]) -> Problem:
    """The problem of an unknown key in a section of a document that describes `cls`.

    The hint is the first of these that exists: the key in other letters; what the name means in this section; the
    section that has the key; what other programs mean by the name; the key that is misspelled or written short, in the
    section and then in others; the name in another program that is misspelled; keys of the section that begin with the
    name; what other programs mean by names that begin like this; the file that has the key; all keys of the section.
    """
    if problem := other_name(cls, path, names):
        return problem
    *section, name = names
    known, plain, inside = _known(cls, section), _plain(name), path.removesuffix(name)
    if near := misspelled(plain, known) or short_for(plain, known):
        return _problem(path, did_you_mean(plain, known) or _list(cls, near), inside + near[0])
    if _is_translated(cls, section) and (elsewhere := _misspelled_elsewhere(cls, plain)):
        return _problem(path, f"did you mean {elsewhere}?", elsewhere)
    if other := _misspelled_in_other_program(cls, section, plain):
        problem = unknown_key(cls, inside + other, [*section, other])
        return _problem(path, f"if you mean {other}, {problem.hint}", problem.meant)
    hints = (did_you_mean(plain, known), *_hints(cls, section, plain), _list(cls, known))
    return _problem(path, next(filter(None, hints)), "")


def other_name(cls: type, path: str, names: Sequence[str]) -> Problem | None:
    """The problem of an unknown key whose name has a known meaning, here or elsewhere. None for a misspelled key."""
    *section, name = names
    plain, inside = _plain(name), path.removesuffix(name)
    if plain in _known(cls, section):
        return _problem(path, f"use {inside}{plain}", inside + plain)
    if answer := _in_section(cls, section, plain, inside):
        return _problem(path, *answer)
    if found := _places(cls, section, plain):
        return _elsewhere(path, plain, found)
    answer = _in_other_program(cls, section, plain)
    return _problem(path, *answer) if answer else None


def with_heading(problem: Problem, text: str) -> Problem:
    """The problem of a key of a run file with this text. If the heading of its section is still commented out, as in a
    file of `hpcgen init`, so that the key is in the section above, the hint says so."""
    section, _, name = problem.meant.partition(".")
    line = problem.where.line if isinstance(problem.where, FilePlace) else None
    if line is None or not name:
        return problem
    for number, above in reversed([*enumerate(text.splitlines()[: line - 1], 1)]):
        if heading := _COMMENTED_HEADING.fullmatch(above):
            if heading[1] != section:
                return problem
            return dataclasses.replace(problem, hint=f"uncomment {section}: in line {number}")
        if above and above[0] not in " #":
            return problem
    return problem


def _known(cls: type, section: Sequence[str]) -> list[str]:
    return sorted(field.name for field in dataclasses.fields(section_of(cls, section)))


def _plain(name: str) -> str:
    """A key in the letters of keys: underscores, no capitals."""
    return name.lstrip("-").replace("-", "_").lower()


def _problem(path: str, hint: str, meant: str) -> Problem:
    return Problem(path, "is not a known key", hint, meant=meant)


def _is_translated(cls: type, section: Sequence[str]) -> bool:
    """True if the tables of names in other programs apply to this section."""
    return "model" in field_hints(cls) and (not section or section[0] in TRANSLATED_SECTIONS)


def _in_section(cls: type, section: Sequence[str], name: str, inside: str) -> tuple[str, str] | None:
    """The hint and the key for a name that has its meaning in this section only, or in any."""
    if (stage := section_called(name)) and (key := f"{inside}{stage}") in key_paths(cls):
        return f"use {key}", key
    if use := names_in_section(cls.__name__, section).get(name):
        return f"use {use}", spellings.key_of(use)
    if option := set_by_hpcgen(section, name):
        return f"remove it, because hpcgen sets --{option} itself", ""
    if hint := spellings.instead(name):
        return hint, ""
    if _is_section(cls, name) and section and section[-1] != name:
        return f"{name} is a section of its own; write it without indentation", name
    return None


def _in_other_program(cls: type, section: Sequence[str], name: str) -> tuple[str, str] | None:
    """The hint and the key for a name of another program. For example, optimizer_name there is optimizer.name here."""
    joined = "_".join((*section, name))
    for each in (name, joined) if _is_translated(cls, section) else ():
        if spellings.is_known(each):
            return spellings.answer(each), spellings.key(each)
    hint = spellings.instead(joined)
    return (hint, "") if hint else None


def _is_section(cls: type, name: str) -> bool:
    return name in field_hints(cls) and section_of(cls, [name]) is not None


def _elsewhere(path: str, name: str, found: Sequence[str]) -> Problem:
    inner, _, last = found[0].rpartition(".")
    hint = f"write {last} in the section {inner}" if "." in name else f"use {one_of(found)}"
    return _problem(path, hint, found[0])


def _places(cls: type, section: Sequence[str], name: str) -> list[str]:
    """The paths of a key that was written in the wrong section, or without its section. Empty if there are many.

    A key of the same name elsewhere can be something else: `name` in the section optimizer is not the run's name.
    """
    keys = [key for key in key_paths(cls) if f".{key}".endswith(f".{name}")]
    if len(section) <= 1 and _is_translated(cls, section):
        flat = [key for key in keys if key.count(".") == 1 and key.partition(".")[0] in TRANSLATED_SECTIONS]
        if flat or (section and f"slurm.train.{name}" in keys):
            return flat or [f"slurm.train.{name}"]
    below = ".".join((*section, ""))
    found = [key for key in keys if key.startswith(below)]
    found = [key for key in found if key.startswith("slurm.train.")] or found
    if not section and "_" not in name:  # a single word deep inside means something there only
        found = [key for key in found if key.count(".") <= 1 or key.startswith("slurm.train.")]
    return found if len(found) <= MOST_PLACES else []


def _misspelled_elsewhere(cls: type, name: str) -> str | None:
    """The path of the key in the trainer's sections whose name `name` misspells or shortens."""
    paths = {key.partition(".")[2]: key for key in key_paths(cls) if key.startswith(TRANSLATED_SECTIONS)}
    found = misspelled(name, paths) or short_for(name, paths)
    return paths[found[0]] if len(found) == 1 else None


def _misspelled_in_other_program(cls: type, section: Sequence[str], name: str) -> str | None:
    """The name that another program has for a key of this section, if `name` misspells it."""
    others = spellings.names() if _is_translated(cls, section) else []
    names = [*names_in_section(cls.__name__, section), *others]
    is_long = len(name) >= spellings.SHORTEST
    return nearest(name, [each for each in names if len(each) >= spellings.SHORTEST]) if is_long else None


def _hints(cls: type, section: Sequence[str], name: str) -> Iterator[str]:
    """Yields hints for a name that does not resemble any key of its section. Some may be empty."""
    if _is_translated(cls, section):
        yield spellings.answer(name)
    if not section:
        yield _other_file(cls, name)


def _other_file(cls: type, name: str) -> str:
    files = {"run file": RunConfig, "cluster profile": ClusterConfig, "node type": NodeType}
    for file, other in files.items():
        if other is not cls and name in field_hints(other):
            return f"it is a key of the {file} (docs/reference/{file.replace(' ', '-')}.md)"
    return ""


def _list(cls: type, known: Sequence[str]) -> str:
    commands = {ClusterConfig: "hpcgen schema cluster", NodeType: "hpcgen schema node-type"}
    listed = f"{commands.get(cls, 'hpcgen init')} lists all keys"
    advice = f"known keys are {', '.join(known)}" if len(known) <= MOST_LISTED else listed
    if "extra_directives" in known:
        advice += "; for other options of sbatch, use extra_directives"
    return advice
