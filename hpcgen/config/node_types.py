"""Finds and reads node types: ./topologies, the configuration directories, and those that hpcgen ships."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hpcgen.config import document as documents
from hpcgen.config.directories import configuration_directories
from hpcgen.config.document import Document
from hpcgen.config.fields import Name, constraint_problems
from hpcgen.config.node_type import NodeType
from hpcgen.config.node_type_rules import node_type_problems
from hpcgen.config.validation import build, describe, show
from hpcgen.errors import ConfigErrors, HpcgenError, Problem
from hpcgen.resources import shipped


def node_type_directories() -> list[Path]:
    """Where node types are looked up by name, first match wins."""
    return [Path("topologies"), *configuration_directories("topologies"), shipped("topologies")]


def node_type_names() -> list[str]:
    """Names of all node types that can be found."""
    found = {
        path.stem
        for directory in node_type_directories()
        if directory.is_dir()
        for path in directory.glob("*.yaml")
    }
    return sorted(found)


def find_node_type(name: str, besides: Sequence[Path] = ()) -> Path | None:
    """The first file that `name` can mean, but none of `besides`: ./topologies/ndv5.yaml may extend ndv5."""
    if any(constraint_problems(Name, name)):
        return None
    candidates = [directory / f"{name}.yaml" for directory in node_type_directories()]
    # unlike Path.is_file, it answers where a directory may not be read as well
    return next((path for path in candidates if os.path.isfile(path) and path not in besides), None)  # noqa: PTH113


def read_node_type(name: str) -> Document:
    """The facts of a node type with all that it extends, farthest ancestor lowest.

    Raises:
        ConfigErrors: it extends what is not a node type, or itself in a ring.
        HpcgenError: there is none of that name, or a file that can't be read.
    """
    path = find_node_type(name)
    if path is None:
        problem = unknown_node_type("name")
        raise HpcgenError(f"{show(name)} {problem.reason}", problem.hint)
    chain = [documents.read(path)]
    seen = [path]
    while isinstance(parent := chain[-1].values.get("extends"), str):
        path = find_node_type(parent, seen)
        if path is None:
            raise ConfigErrors([describe(unknown_node_type("extends"), chain[-1])])
        chain.append(documents.read(path))
        seen.append(path)
    merged = chain.pop()
    while chain:
        merged = documents.merge(merged, chain.pop())
    return merged


def load_node_type(name: str) -> NodeType:
    """The node type of that name.

    Raises:
        ConfigErrors: every mistake in its file.
        HpcgenError: there is none of that name, or a file that can't be read.
    """
    document = read_node_type(name)
    built = build(NodeType, document)
    problems = list(built.problems)
    if built.config is not None and not problems:
        problems = list(node_type_problems(built.config))
    if built.config is None or problems:
        raise ConfigErrors([describe(problem, document) for problem in problems])
    return built.config


def unknown_node_type(key: str) -> Problem:
    """What is said of a name, written at `key`, that means no file."""
    return Problem(key, "is not a node type", f"use one of {', '.join(node_type_names())}")
