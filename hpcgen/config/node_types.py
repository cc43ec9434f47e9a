"""Finds and reads node types in local directories, the configuration directories, and those shipped with hpcgen."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

from hpcgen.config import document as documents
from hpcgen.config.directories import (
    directories_of,
    is_below,
    names_in,
    origin,
    readable,
)
from hpcgen.config.document import Document
from hpcgen.config.fabric import FOLDER, lowest_layer
from hpcgen.config.fields import Name, constraint_problems
from hpcgen.config.inheritance import explain_removals, inherit
from hpcgen.config.node_type import FabricName, NodeType
from hpcgen.config.node_type_rules import node_type_problems
from hpcgen.config.shown import show
from hpcgen.config.site_doubts import excluded, fabric_contradictions, inherited_devices, missing_fabric
from hpcgen.config.trust import require_trusted_file
from hpcgen.config.validation import build, located
from hpcgen.errors import ConfigErrors, HpcgenError, Problem, file_of
from hpcgen.resources import shipped
from hpcgen.text import did_you_mean
from trainer.contract.record import record


def node_type_directories(base: Path | None = None, sites: Sequence[Path] = ()) -> list[Path]:
    """The directories in which node types are looked up by name (see `directories_of`)."""
    return directories_of("topologies", base, sites)


def node_type_names(base: Path | None = None, sites: Sequence[Path] = ()) -> list[str]:
    """Names of all available node types."""
    return names_in(node_type_directories(base, sites))


def find_node_type(
    name: str, seen: Sequence[Path] = (), base: Path | None = None, sites: Sequence[Path] = ()
) -> Path | None:
    """The first matching file that is not in `seen`, so that ./topologies/ndv5.yaml may extend ndv5."""
    if any(constraint_problems(Name, name)):
        return None
    candidates = [directory / f"{name}.yaml" for directory in readable(node_type_directories(base, sites))]
    # unlike Path.is_file, isfile does not raise for a name that is too long
    return next((path for path in candidates if os.path.isfile(path) and path not in seen), None)  # noqa: PTH113


def read_node_type(name: str, base: Path | None = None, sites: Sequence[Path] = ()) -> Document:
    """The facts of a node type, merged with the node types that it extends and with its fabric.

    Raises:
        ConfigErrors: it extends an unknown node type, or node types extend each other in a cycle.
        HpcgenError: the node type is unknown, or a file cannot be read or could be changed by other users.
    """
    return _merged(_family(name, base, sites))


def _merged(family: Mapping[Path, Document]) -> Document:
    """The facts of the files of a node type and its fabric, where earlier files win."""
    document = inherit(NodeType, list(family.values()))
    if (fabric := document.get("fabric")) in get_args(FabricName):
        document = inherit(NodeType, [*family.values(), lowest_layer(fabric)])
    return document


def _family(name: str, base: Path | None, sites: Sequence[Path]) -> dict[Path, Document]:
    """The files of a node type and of those that it extends. Each comes before all files that it extends."""
    path = find_node_type(name, base=base, sites=sites)
    if path is None:
        problem = unknown_node_type("name", name, base, sites)
        raise HpcgenError(f"{show(name)} {problem.reason}", problem.hint)
    find = functools.partial(find_node_type, base=base, sites=sites)
    return _family_of(path, _read(path), name, find)


def _family_of(
    path: Path, document: Document, name: str, find: functools.partial[Path | None]
) -> dict[Path, Document]:
    family: dict[Path, Document] = {}
    _add_family(path, document, {path: name}, family, find)
    return dict(reversed(family.items()))


def _add_family(
    path: Path,
    document: Document,
    line: dict[Path, str],
    family: dict[Path, Document],
    find: functools.partial[Path | None],
) -> None:
    """Adds to `family` what `document` extends, from the last to the first, and then `document` itself.

    `path` is its file, and `line` has the files from the node type to `path`, and their names.
    """
    for key, parent in reversed(list(_parents(document))):
        found = find(parent, list(line))
        if found is None:
            known = find(parent)
            names = list(line.values())
            problem = (
                dataclasses.replace(cycle(names[list(line).index(known) :]), path=key)
                if known
                else unknown_node_type(key, parent, **find.keywords)
            )
            raise ConfigErrors([located(problem, document)])
        if found not in family:
            _add_family(found, _read(found), {**line, found: parent}, family, find)
    family[path] = document


def _parents(document: Document) -> Iterator[tuple[str, str]]:
    """Yields the names that a file extends, each with its path in the document."""
    extends = document.values.get("extends")
    if isinstance(extends, str):
        yield "extends", extends
    for index, name in enumerate(extends if isinstance(extends, list) else ()):
        if isinstance(name, str):
            yield f"extends[{index}]", name


def _read(path: Path) -> Document:
    if not is_below(path, shipped("topologies")):
        require_trusted_file(path, looked_up=True)
    return documents.read(path)


@record
class LoadedNodeType:
    """A node type, merged with the node types that it extends and with its fabric."""

    config: NodeType
    document: Document
    files: tuple[str, ...]
    """Names of its files for the header of a script. The node type's own file comes first."""
    doubts: tuple[Problem, ...] = ()
    """Facts that are valid but probably wrong, reported at a profile's key `node_type`."""


def load_node_type(name: str) -> NodeType:
    """The node type `name`.

    Raises:
        ConfigErrors: its file has mistakes. Lists all of them.
        HpcgenError: see `read_node_type`.
    """
    return load_with_files(name).config


def load_with_files(name: str, base: Path | None = None, sites: Sequence[Path] = ()) -> LoadedNodeType:
    """The node type, with its files and the places of its facts.

    Raises:
        ConfigErrors, HpcgenError: see `load_node_type`.
    """
    return _loaded(_family(name, base, sites))


def load_document(path: Path, document: Document, base: Path) -> LoadedNodeType:
    """The node type that `document` describes, as if it were in the file `path`.

    Raises:
        ConfigErrors, HpcgenError: see `load_node_type`.
    """
    find = functools.partial(find_node_type, base=base, sites=())
    return _loaded(_family_of(path, document, path.stem, find))


def inherited(path: Path, document: Document, base: Path) -> Document:
    """The facts that a node type inherits: those of `document` if it had only its `extends`."""
    find = functools.partial(find_node_type, base=base, sites=())
    extends = {key: value for key, value in document.values.items() if key == "extends"}
    return _merged(_family_of(path, dataclasses.replace(document, values=extends), path.stem, find))


def _loaded(family: Mapping[Path, Document]) -> LoadedNodeType:
    document = _merged(family)
    node_type, wrong = build(NodeType, _with_list(document))
    problems = list(
        explain_removals(NodeType, wrong, document) if node_type is None else node_type_problems(node_type)
    )
    if node_type is None or problems:
        raise ConfigErrors([located(_placed(problem, document), document) for problem in problems])
    files = tuple(origin(path, shipped("topologies")) for path in family)
    doubts = (
        *inherited_devices(family, document),
        *fabric_contradictions(node_type),
        *missing_fabric(node_type, _values(node_type)),
        *_excluded(node_type, document),
    )
    return LoadedNodeType(node_type, document, files, doubts)


def _excluded(node_type: NodeType, document: Document) -> Iterator[Problem]:
    """Yields variables of a node type that contradict its network."""
    for name, reason in excluded(_values(node_type), node_type):
        where = document.origin(f"environment.{name}.value")
        yield Problem("node_type", f"sets {name} ({where}), which {reason}", "remove it there", "cluster")


def _values(node_type: NodeType) -> dict[str, str]:
    return {name: fact.value for name, fact in node_type.environment.items()}


def _with_list(document: Document) -> Document:
    """The document, where `extends` is a list."""
    name = document.values.get("extends")
    if not isinstance(name, str):
        return document
    return dataclasses.replace(document, values={**document.values, "extends": [name]})


def set_by(document: Document, path: str) -> str:
    """The node type or fabric that sets the value at `path`, such as "ndv5" or "fabrics/efa"."""
    return _layer(file_of(document.origin(path)), shipped("topologies"))


@functools.cache  # a variable of each stage, in every change that `explain` considers, names its layer
def _layer(name: str, topologies: Path) -> str:
    file = Path(name)
    return f"{FOLDER}/{file.stem}" if file.parent == topologies / FOLDER else file.stem


def unknown_node_type(key: str, name: str, base: Path | None = None, sites: Sequence[Path] = ()) -> Problem:
    """The problem for an unknown node type at `key`."""
    known = node_type_names(base, sites)
    hint = did_you_mean(name, known) or f"use one of {', '.join(known)}"
    return Problem(key, "is not a known node type", hint)


def cycle(names: Sequence[str]) -> Problem:
    """The problem for `extends` in the last of these files, which extends the first of them."""
    return Problem("extends", f"forms a cycle: {' extends '.join((*names, names[0]))}", "remove one of them")


def _placed(problem: Problem, document: Document) -> Problem:
    """The problem, with the place of each fact that it mentions and another file sets."""
    own = file_of(document.origin(problem.path))
    places = {name: document.origins.get(name) for name in problem.about if own and name in document.values}
    others = [f"{name}: {where}" for name, where in places.items() if where and file_of(where) != own]
    return (
        dataclasses.replace(problem, reason=f"{problem.reason} ({', '.join(others)})") if others else problem
    )
