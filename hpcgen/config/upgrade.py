"""Writes a profile or a node type of an earlier version in today's form, without changing what it means."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcgen.config import document as documents
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.document import Document
from hpcgen.config.edits import Keys, comment_of, with_first, with_value, without
from hpcgen.config.node_type import NodeType
from hpcgen.config.node_types import inherited, load_document, load_node_type, node_type_names
from hpcgen.config.profiles import read_profile
from hpcgen.config.slurm import SETTING_NAMES
from hpcgen.config.stages import STAGE_ROWS
from hpcgen.errors import HpcgenError
from hpcgen.text import few
from trainer.contract.config import field_hints
from trainer.contract.record import record

TEXTS = ("extends", "description", "tried", "sources")
"""Keys of a node type that are no facts."""
OF_VARIABLE = ("why", "source")
"""Keys of a variable that are no facts."""
FEWEST_FACTS = 3
"""A node type extends another one only if that saves as many facts."""
MOST_NAMES = 8


@record
class Upgrade:
    """A file in today's form."""

    text: str
    is_node_type: bool = False
    remarks: tuple[str, ...] = ()
    """The new meaning of the file, and improvements that its owner can make."""


def upgraded(file: Path) -> Upgrade:
    """The profile or node type in today's form.

    Raises:
        HpcgenError: the file is neither, or cannot be read; it or a file that it extends has mistakes.
    """
    text = documents.read_text(file)
    document = documents.parse(text, str(file))
    return _node_type(file, text) if _is_node_type(file, document) else _profile(file, text)


def _is_node_type(file: Path, document: Document) -> bool:
    """Decides by the keys, and if they do not tell, by the directory.

    Raises:
        HpcgenError: the keys belong to neither.
    """
    keys = document.values.keys()
    profile, node_type = (len(keys & field_hints(cls).keys()) for cls in (ClusterConfig, NodeType))
    if not profile and not node_type:
        hint = "name the file of a cluster profile or of a node type"
        raise HpcgenError("neither a cluster profile nor a node type", hint, where=file)
    return node_type > profile or (node_type == profile and file.absolute().parent.name == "topologies")


# ---- profiles ----


def _profile(file: Path, text: str) -> Upgrade:
    """Options in `extra_directives` that have a key become that key."""
    before, edited = _profile_facts(file, text), text
    for section, index, key, value in _directives_with_key(documents.parse(text, str(file))):
        old: Keys = (*section, "extra_directives", index)
        edited = with_value(edited, str(file), [*section, key], value, comment_of(edited, old))
        edited = without(edited, str(file), old)
    _require_same(file, before, _profile_facts(file, edited))
    return Upgrade(edited)


def _directives_with_key(document: Document) -> Iterator[tuple[tuple[str, ...], int, str, Any]]:
    """Yields the section, index, key and value of each option that is a key. Later ones come first, so that the
    indices of the others stay."""
    for section in (("slurm",), *(("slurm", row.section) for row in STAGE_ROWS.values())):
        values = document.get(".".join(section))
        directives = values.get("extra_directives") if isinstance(values, dict) else None
        for index, directive in reversed(list(enumerate(directives or ()))):
            key, value = _setting(directive)
            if key in SETTING_NAMES and key != "extra_directives" and key not in values:
                yield section, index, key, value


def _setting(directive: str) -> tuple[str, Any]:
    """The key that has the name of an option of sbatch, and its value."""
    name, _, value = directive.removeprefix("--").partition("=")
    return name.replace("-", "_"), int(value) if value.isdecimal() else value.strip('"')


def _profile_facts(file: Path, text: str) -> dict[str, Any]:
    """The values of a profile, with the options of each stage however they are written."""
    config = read_profile(str(file.absolute()), text=text).config
    facts = dataclasses.asdict(config)
    del facts["slurm"]
    for row in STAGE_ROWS.values():
        options = dataclasses.asdict(config.slurm.merged(row))
        general, own = config.slurm.extra_directives or (), config.slurm.of(row).extra_directives or ()
        del options["extra_directives"]
        extra = dict(map(_setting, (*general, *own)))
        facts[row.name] = {
            **options,
            **{key: value for key, value in extra.items() if options.get(key) is None},
        }
    return facts


# ---- node types ----


def _node_type(file: Path, text: str) -> Upgrade:
    """Facts that the file repeats are inherited, if it extends nothing from the base type that saves most."""
    document, base = documents.parse(text, str(file)), file.absolute().parent.parent
    before = _facts(load_document(file, document, base).config)
    for parent in [] if "extends" in document.values else _bases(file, document, base):
        child = with_first(text, str(file), "extends", parent)
        edited, nulls = _child(file, child, base, with_nulls=True)
        try:
            after = _facts(load_document(file, documents.parse(edited, str(file)), base).config)
        except HpcgenError:  # a null is no value of a fact that the base type has
            continue
        if after == before:
            return Upgrade(edited, True, tuple(_remarks(parent, nulls)))
    edited, _ = _child(file, text, base, with_nulls=False)
    _require_same(file, before, _facts(load_document(file, documents.parse(edited, str(file)), base).config))
    return Upgrade(edited, True)


def _bases(file: Path, document: Document, base: Path) -> list[str]:
    """Shipped types of no site with which the file has fewer facts, those that save most first."""
    saved = {}
    for name in node_type_names(base):
        if name == file.stem or load_node_type(name).site is not None:
            continue
        above = inherited(file, documents.constant({"extends": name}, ""), base).values
        repeated, missing = _repeated(document.values, above), _missing(document.values, above)
        saved[name] = sum(1 for _ in repeated) - sum(1 for _ in missing)
    return [name for name in sorted(saved, key=lambda name: -saved[name]) if saved[name] >= FEWEST_FACTS]


def _child(file: Path, text: str, base: Path, *, with_nulls: bool) -> tuple[str, list[str]]:
    """The text without the facts that it inherits, and `with_nulls` for facts that only the base type has. Also returns
    the paths of these."""
    name, document = str(file), documents.parse(text, str(file))
    if "extends" not in document.values:
        return text, []
    above = inherited(file, document, base).values
    repeated = list(_repeated(document.values, above))
    missing = list(_missing(document.values, above)) if with_nulls else []
    for keys in repeated:
        text = without(text, name, keys)
        if len(keys) == 1 and keys[0] in (document.values.get("sources") or {}):
            text = without(text, name, ["sources", keys[0]])
    for keys in missing:
        text = with_value(text, name, keys, None)
    return text, [".".join(map(str, keys)) for keys in missing]


def _repeated(own: Mapping[str, Any], above: Mapping[str, Any], path: Keys = ()) -> Iterator[Keys]:
    """Yields the keys of facts that are equal in `above`, without those inside of an equal section."""
    for key, value in own.items():
        if (not path and key in TEXTS) or key not in above:
            continue
        if _plain(value) == _plain(above[key]):
            yield (*path, key)
        elif isinstance(value, dict) and isinstance(above[key], dict) and "value" not in value:
            yield from _repeated(value, above[key], (*path, key))


def _missing(own: Mapping[str, Any], above: Mapping[str, Any], path: Keys = ()) -> Iterator[Keys]:
    """Yields the keys of facts that only `above` has."""
    for key, value in above.items():
        if (not path and key in TEXTS) or (path and key in OF_VARIABLE):
            continue
        if key not in own:
            yield (*path, key)
        elif isinstance(value, dict) and isinstance(own[key], dict):
            yield from _missing(own[key], value, (*path, key))


def _plain(value: Any) -> Any:
    """A fact without texts."""
    if not isinstance(value, dict):
        return value
    return {key: _plain(item) for key, item in value.items() if key not in OF_VARIABLE}


def _facts(node_type: NodeType) -> Any:
    facts = dataclasses.asdict(node_type)
    return _plain({key: value for key, value in facts.items() if key not in TEXTS})


def _remarks(parent: str, nulls: list[str]) -> Iterator[str]:
    yield f"extends {parent}, whose reasons and sources now apply"
    if nulls:
        names = few(nulls, MOST_NAMES)
        yield f"{names}: null, because {parent} sets it and the file did not; remove the line to have its value"


def _require_same(file: Path, before: Any, after: Any) -> None:
    if before != after:
        changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        raise HpcgenError(
            f"the new form would change {', '.join(changed)}", "report this with the file", where=file
        )
