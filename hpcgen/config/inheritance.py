"""`extends` of cluster profiles and node types: how a file inherits, changes and removes values."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hpcgen.config import document as documents
from hpcgen.config.document import Document
from hpcgen.errors import Problem
from hpcgen.text import did_you_mean
from trainer.contract.config import field_hints


def inherit(cls: type, chain: Sequence[Document]) -> Document:
    """Merges a file and the files that it extends, given in this order, into one document that describes `cls`.

    Mappings are merged and everything else is replaced. In a field of `cls` that is a mapping of names (`environment`,
    `partitions`), null removes the inherited entry of that name, and null for the field removes all entries.

    A value that replaces one with a source (`sources.KEY`, `environment.NAME.source`) gets the place where it is set as
    its source, unless the file names another source.
    """
    *children, merged = chain
    for child in reversed(children):
        restated = _restated_sources(merged, child)
        removed = [path for path in _removals(cls, child) if merged.get(path) is not None]
        merged = documents.merge(documents.merge(merged, restated), child)
        for path in removed:
            merged = documents.without(merged, path)
    return merged


def explain_removals(cls: type, problems: Iterable[Problem], document: Document) -> Iterator[Problem]:
    """Yields the problems, with a better reason for nulls that remove nothing."""
    unused = set(_removals(cls, document))
    for problem in problems:
        if problem.path in unused:
            section, _, name = problem.path.partition(".")
            known = [key for key in document.values[section] if key != name] if name else []
            reason = "removes nothing, because no extended file sets it"
            problem = Problem(problem.path, reason, did_you_mean(name, known) or "remove the line")
        yield problem


def _removals(cls: type, document: Document) -> Iterator[str]:
    """Yields the paths of nulls that mean a removal."""
    hints = field_hints(cls)
    for field in dataclasses.fields(cls):
        if typing.get_origin(hints[field.name]) is not dict or field.name not in document.values:
            continue
        entries = document.values[field.name]
        if entries is None:
            yield field.name
        elif isinstance(entries, dict):
            yield from (f"{field.name}.{name}" for name, value in entries.items() if value is None)


def _restated_sources(parent: Document, child: Document) -> Document:
    """The new sources of values that the child changes without naming a source."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def restate(path: str, changed: str) -> None:
        old, origin = parent.get(path), child.origin(changed)
        if not isinstance(old, str) or child.get(path) is not None or origin is None:
            return
        is_part = isinstance(child.get(changed), dict) and isinstance(parent.get(changed), dict)
        *sections, key = path.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = f"{origin}; the rest: {old}" if is_part else str(origin)
        origins[path] = origin

    for key in child.values:
        restate(f"sources.{key}", key)
    for section in ("environment", "sharp"):
        entries = child.values.get(section)
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            if isinstance(entry, dict) and "value" in entry:
                restate(f"{section}.{name}.source", f"{section}.{name}.value")
    return Document(values, origins)
