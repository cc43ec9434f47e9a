"""Reads values with pydantic, which reports all mistakes. Its import takes 50 ms, so only invalid files are read so.

Its errors become problems, with what the user probably meant.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from hpcgen.config.corrections import correction
from hpcgen.config.fields import constraint_problems
from hpcgen.config.keys import hint_of, required_keys
from hpcgen.config.spellings import choice
from hpcgen.config.unknown_keys import unknown_key
from hpcgen.errors import Problem
from hpcgen.text import did_you_mean, one_of

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


def read(cls: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass with these values.

    Raises:
        ValidationError: there are mistakes in keys, types or ranges. Has all of them.
    """
    # a lone surrogate, which `constraint_problems` refuses, is not valid JSON and is replaced by "?" here
    text = json.dumps(values, ensure_ascii=False).encode("utf-8", errors="replace")
    built: T = _adapter(cast(Any, cls)).validate_json(text, strict=True)
    return built


@functools.cache
def _adapter(cls: Any) -> Any:
    return TypeAdapter(cls)


def schema_problems(cls: type, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields the mistakes in the keys, types and ranges of `values`."""
    numbers = [
        path for path, value in _leaves(values) if isinstance(value, float) and not math.isfinite(value)
    ]
    yield from (Problem(path, "must be a finite number") for path in numbers)
    try:
        read(cls, values)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=True):
            if detail["type"] in ("missing", "missing_argument"):
                yield from _missing(cls, *_path_and_names(detail))
            else:
                yield _problem(cls, detail, values)


def _missing(cls: type, path: str, names: Sequence[str]) -> Iterator[Problem]:
    """Yields the problem of a missing key, or of each key that a missing section must have."""
    section = hint_of(cls, names)
    required = required_keys(section) if dataclasses.is_dataclass(section) else []
    for name in required:
        yield from _missing(cls, f"{path}.{name}", [*names, name])
    if not required:
        yield Problem(path, "is missing", is_missing=True)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _path_and_names(detail: Any) -> tuple[str, list[str]]:
    """The dotted path of an error, and the names of its keys without the indices of lists."""
    path, names = "", []
    for part in detail["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":
            path = f"{path}.{part}" if path else part
            names.append(part)
    return path, names


def _problem(cls: type, detail: Any, values: Mapping[str, Any]) -> Problem:
    path, names = _path_and_names(detail)
    kind = detail["type"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return unknown_key(cls, path, names)
    if kind == "literal_error":
        choices = [choice.strip("'") for choice in re.split(r", | or ", detail["ctx"]["expected"])]
        return Problem(path, f"must be {one_of(choices)}", _meant(str(detail["input"]), choices))
    value = detail["input"]
    if kind == "string_type" and isinstance(value, int | float):
        return Problem(path, _text_reason(hint_of(cls, names), value), "")
    reason = f"must be {EXPECTED[kind]}" if kind in EXPECTED else str(detail["msg"]).lower()
    return Problem(path, reason, correction(cls, path, names, kind, value, values))


def _text_reason(hint: Any, value: float) -> str:
    """The reason for a number in place of a text: it needs quotes, or is not a valid text even with quotes."""
    problem = next(constraint_problems(hint, str(value)), None)
    return problem.reason if problem else "must be text (quote it)"


def _meant(value: str, choices: list[str]) -> str:
    """A hint with the choice for another program's value, or with the nearest choices."""
    meant = choice(value)
    return f"use {meant}" if meant.partition(",")[0] in choices else did_you_mean(value, choices)
