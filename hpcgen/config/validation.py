"""Builds configuration dataclasses from documents and reports all mistakes in types, keys and ranges."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable
from typing import Any, TypeVar

from hpcgen.config.document import Document, constant, is_preset
from hpcgen.config.fields import constraint_problems
from hpcgen.config.shown import is_private, show
from hpcgen.errors import ConfigErrors, Problem
from trainer.contract.config import ConfigError, from_dict

T = TypeVar("T")


def build(cls: type[T], document: Document) -> tuple[T | None, tuple[Problem, ...]]:
    """Builds the dataclass that `document` describes, or lists all mistakes in its keys, types and ranges.

    A valid document is read by the trainer's strict reader, which stops at the first mistake. Only an invalid one goes
    through pydantic, which reports all mistakes but takes 50 ms to import.
    """
    values = document.values
    constraints = list(constraint_problems(cls, values))
    if not constraints:
        with contextlib.suppress(ConfigError):
            return from_dict(cls, values, where=""), ()
    from hpcgen.config.pydantic_reader import read, schema_problems  # imports pydantic

    problems = _first_of_each_path([*schema_problems(cls, values), *constraints])
    meant = [f"{problem.meant}." for problem in problems if problem.meant]
    problems = tuple(
        problem
        for problem in problems
        if not problem.is_missing
        or not any(key.startswith(f"{problem.path}.") or problem.path.startswith(key) for key in meant)
    )
    return None if problems else read(cls, values), problems


def located(problem: Problem, document: Document, resolved: object = None) -> Problem:
    """The problem with the place of its value, and the value.

    A value that is not in the document is looked up in `resolved`, the configuration with its defaults. If the value is
    from a preset or a default and conflicts with a key that the user set, the place is that key's.
    """
    value = document.get(problem.path)
    where = document.origin(problem.path)
    is_default = where is None
    if where is None:
        has_default = resolved is not None and not problem.is_missing
        where = "default" if has_default else document.nearest_origin(problem.path)
        value = _attribute(resolved, problem.path)
    is_silent = is_private(problem.path) or not _is_value(value) or (is_default and value is None)
    plain = None if is_silent else _in_json(value)
    if where.startswith("--") and not where.startswith("--set"):  # an option that sets one key
        option = where if is_silent else f"{where} {show(value)}"
        return dataclasses.replace(problem, subject=option, value=plain)
    path = problem.path if len(problem.path) <= 120 else problem.path[:117] + "..."
    path = (path if path.isprintable() else ascii(path)) or "the file"
    subject = path if is_silent else f"{path} = {show(value)}"
    if _is_not_the_users(where) and (chosen := _conflicting_origin(problem, document)):
        subject += "" if is_silent else f" ({where})"
        where = chosen
    return dataclasses.replace(problem, where=where, subject=subject, value=plain)


def _in_json(value: object) -> object:
    """The value itself, or as text if JSON cannot express it, such as an infinite number."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return show(value)
    return value


def _is_not_the_users(origin: str) -> bool:
    return origin == "default" or is_preset(origin)


def _conflicting_origin(problem: Problem, document: Document) -> str | None:
    """The origin of the first other key that the problem is about and that the user set."""
    origins = map(document.origin, problem.about)
    return next((origin for origin in origins if origin and not _is_not_the_users(origin)), None)


def _is_value(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple)


def _attribute(config: object, path: str) -> object:
    for name in path.split("."):
        config = getattr(config, name, dataclasses.MISSING)
    return config


def _first_of_each_path(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    kept: dict[str, Problem] = {}
    for problem in problems:
        kept.setdefault(problem.path, problem)
    return tuple(kept.values())


def check_text(cls: type, values: dict[str, Any], origin: str) -> None:
    """Checks values against the constraints of `cls`. Keys may be missing.

    Raises:
        ConfigErrors: values are invalid. Lists all of them.
    """
    document = constant(values, origin)
    mistakes = [located(problem, document) for problem in constraint_problems(cls, values)]
    if mistakes:
        raise ConfigErrors(mistakes)
