"""Finds and reads node types in local directories, the configuration directories, and those shipped with hpcgen."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from hpcgen.config import document as documents
from hpcgen.config.directories import (
    configuration_directories,
    is_below,
    local_directories,
    names_in,
    origin,
    readable,
)
from hpcgen.config.document import Document
from hpcgen.config.fields import Name, constraint_problems
from hpcgen.config.inheritance import explain_removals, inherit
from hpcgen.config.node_type import NodeType
from hpcgen.config.node_type_rules import node_type_problems
from hpcgen.config.shown import show
from hpcgen.config.trust import require_trusted_file
from hpcgen.config.validation import build, located
from hpcgen.errors import ConfigErrors, HpcgenError, Problem, file_of
from hpcgen.resources import shipped
from hpcgen.text import did_you_mean


def node_type_directories(base: Path | None = None, sites: Sequence[Path] = ()) -> list[Path]:
    """The directories in which node types are looked up by name. The first match is used.

    `base` is the directory of the run file; None without a run file. For `sites`, see `Profile.sites`.
    """
    return [
        *local_directories("topologies", base),
        *configuration_directories("topologies", sites),
        shipped("topologies"),
    ]


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
    """The facts of a node type, merged with the node types that it extends.

    Raises:
        ConfigErrors: it extends an unknown node type, or node types extend each other in a cycle.
        HpcgenError: the node type is unknown, or a file cannot be read or could be changed by other users.
    """
    return inherit(NodeType, [document for _, document in _chain(name, base, sites)])


def _chain(name: str, base: Path | None, sites: Sequence[Path]) -> list[tuple[Path, Document]]:
    path = find_node_type(name, base=base, sites=sites)
    if path is None:
        problem = unknown_node_type("name", name, base, sites)
        raise HpcgenError(f"{show(name)} {problem.reason}", problem.hint)
    chain, names, seen = [_read(path)], [name], [path]
    while isinstance(parent := chain[-1].values.get("extends"), str):
        path = find_node_type(parent, seen, base, sites)
        if path is None:
            known = find_node_type(parent, base=base, sites=sites)
            problem = (
                cycle(names[seen.index(known) :])
                if known
                else unknown_node_type("extends", parent, base, sites)
            )
            raise ConfigErrors([located(problem, chain[-1])])
        chain.append(_read(path))
        names.append(parent)
        seen.append(path)
    return list(zip(seen, chain, strict=True))


def _read(path: Path) -> Document:
    if not is_below(path, shipped("topologies")):
        require_trusted_file(path, looked_up=True)
    return documents.read(path)


def load_node_type(name: str) -> NodeType:
    """The node type `name`.

    Raises:
        ConfigErrors: its file has mistakes. Lists all of them.
        HpcgenError: see `read_node_type`.
    """
    return load_node_type_and_files(name)[0]


def load_node_type_and_files(
    name: str, base: Path | None = None, sites: Sequence[Path] = ()
) -> tuple[NodeType, tuple[str, ...]]:
    """The node type, and the names of its files for the header of a script. The node type's own file comes first.

    Raises:
        ConfigErrors, HpcgenError: see `load_node_type`.
    """
    chain = _chain(name, base, sites)
    document = inherit(NodeType, [facts for _, facts in chain])
    node_type, wrong = build(NodeType, document)
    problems = list(
        explain_removals(NodeType, wrong, document) if node_type is None else node_type_problems(node_type)
    )
    if node_type is None or problems:
        raise ConfigErrors([located(_placed(problem, document), document) for problem in problems])
    return node_type, tuple(origin(path, shipped("topologies")) for path, _ in chain)


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
