"""Builds configuration dataclasses from documents and reports all mistakes in types, keys and ranges."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

from hpcgen.config.document import Document, constant, is_preset
from hpcgen.config.fields import constraint_problems
from hpcgen.config.keys import hint_of
from hpcgen.config.shown import is_private, show
from hpcgen.errors import ConfigErrors, Problem
from hpcgen.text import did_you_mean, one_of
from trainer.contract.config import ConfigError, from_dict

T = TypeVar("T")

EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "dataclass_type": "a mapping of keys to values",
    "dataclass_exact_type": "a mapping of keys to values",
}
"""pydantic's error type -> description of the expected value."""


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
    problems = _first_of_each_path([*_schema_problems(cls, values), *constraints])
    meant = [f"{problem.meant}." for problem in problems if problem.meant]
    problems = tuple(
        problem
        for problem in problems
        if not problem.is_missing
        or not any(key.startswith(f"{problem.path}.") or problem.path.startswith(key) for key in meant)
    )
    return None if problems else _validate(cls, values), problems


def _validate(cls: type[T], values: Mapping[str, Any]) -> T:
    # a lone surrogate, which `constraint_problems` refuses, is not valid JSON and is replaced by "?" here
    text = json.dumps(values, ensure_ascii=False).encode("utf-8", errors="replace")
    built: T = _adapter(cast(Any, cls)).validate_json(text, strict=True)
    return built


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


@functools.cache
def _adapter(cls: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _schema_problems(cls: type, values: Mapping[str, Any]) -> Iterator[Problem]:
    from pydantic import ValidationError

    numbers = [
        path for path, value in _leaves(values) if isinstance(value, float) and not math.isfinite(value)
    ]
    yield from (Problem(path, "must be a finite number") for path in numbers)
    try:
        _validate(cls, values)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=True):
            yield _problem(cls, detail, values)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _problem(cls: type, detail: Any, values: Mapping[str, Any]) -> Problem:
    from hpcgen.config.corrections import correction  # only for mistakes
    from hpcgen.config.unknown_keys import unknown_key

    path, names = "", []
    for part in detail["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":
            path = f"{path}.{part}" if path else part
            names.append(part)
    kind = detail["type"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return unknown_key(cls, path, names)
    if kind in ("missing", "missing_argument"):
        return Problem(path, "is missing", is_missing=True)
    if kind == "literal_error":
        choices = [choice.strip("'") for choice in re.split(r", | or ", detail["ctx"]["expected"])]
        return Problem(path, f"must be {one_of(choices)}", _meant(str(detail["input"]), choices))
    value = detail["input"]
    if kind == "string_type" and isinstance(value, int | float):
        return Problem(path, _text_reason(hint_of(cls, names), value), "")
    reason = f"must be {EXPECTED[kind]}" if kind in EXPECTED else str(detail["msg"]).lower()
    return Problem(path, reason, correction(cls, path, names, kind, value, values))


def _text_reason(hint: Any, value: float) -> str:
    """The reason for a number in place of a text: it needs quotes, or is no valid text with them either."""
    problem = next(constraint_problems(hint, str(value)), None)
    return problem.reason if problem else "must be text (quote it)"


def _meant(value: str, choices: list[str]) -> str:
    """A hint with the choice for another program's value, or with the nearest choices."""
    from hpcgen.config.spellings import choice

    meant = choice(value)
    return f"use {meant}" if meant.partition(",")[0] in choices else did_you_mean(value, choices)


def check_text(cls: type, values: dict[str, Any], origin: str) -> None:
    """Checks values against the constraints of `cls`. Keys may be missing.

    Raises:
        ConfigErrors: values are invalid. Lists all of them.
    """
    document = constant(values, origin)
    mistakes = [located(problem, document) for problem in constraint_problems(cls, values)]
    if mistakes:
        raise ConfigErrors(mistakes)
