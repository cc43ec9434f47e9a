"""Builds configuration dataclasses from documents and reports all mistakes in types, keys and ranges."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import shlex
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, Union, cast

from hpcgen.config import spellings
from hpcgen.config.document import Document, constant
from hpcgen.config.fields import constraint_problems
from hpcgen.errors import ConfigErrors, Mistake, Problem
from hpcgen.text import did_you_mean, one_of
from trainer.contract.config import ConfigError, field_hints, from_dict

T = TypeVar("T")

EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text (quote it)",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "dataclass_type": "a mapping of keys to values",
    "dataclass_exact_type": "a mapping of keys to values",
}
"""pydantic's error type -> description of the expected value."""


MEANT = {"gpu": "cuda", "gpus": "cuda", "nvidia": "cuda"}
"""Common mistake -> intended value, where spelling alone would suggest another value (cpu)."""

TRANSLATED_SECTIONS = ("model", "parallelism", "training", "optimizer", "data", "checkpoint", "logging")
"""Sections of a run file whose keys have other names in other training programs."""


@dataclass(frozen=True)
class Built(Generic[T]):
    """The result of building a dataclass."""

    config: T | None
    """The dataclass without invalid values. None if it would be incomplete without them."""
    problems: tuple[Problem, ...]


def build(
    cls: type[T], document: Document, stand_ins: Mapping[str, Any] = types.MappingProxyType({})
) -> Built[T]:
    """Builds the dataclass that `document` describes, and lists all mistakes in it.

    A required key that is missing or invalid gets its value from `stand_ins`. A section without a required key that is
    not in `stand_ins` is left out.

    A valid document is read by the trainer's strict reader, which stops at the first mistake. Only an invalid one goes
    through pydantic, which reports all mistakes but takes 50 ms to import.
    """
    values = document.values
    constraints = list(constraint_problems(cls, values))
    if not constraints:
        with contextlib.suppress(ConfigError):
            return Built(from_dict(cls, values, where=""), ())
    problems = _first_of_each_path([*_schema_problems(cls, values), *constraints])
    for problem in problems:
        values = _without(values, _keys(problem.path))
    while missing := list(_schema_problems(cls, values)):
        completed = _completed(values, missing, constant(stand_ins, ""))
        if completed == values:
            return Built(None, problems)
        values = completed
    return Built(_validate(cls, values), problems)


def _completed(values: dict[str, Any], missing: Sequence[Problem], stand_ins: Document) -> dict[str, Any]:
    """`values` with stand-ins for the missing keys, and without the sections of those that have none."""
    for problem in missing:
        keys, stand_in = _keys(problem.path), stand_ins.get(problem.path)
        values = _without(values, keys[:-1]) if stand_in is None else _with(values, keys, stand_in)
    return values


def _validate(cls: type[T], values: Mapping[str, Any]) -> T:
    # a lone surrogate, which `constraint_problems` refuses, is not valid JSON and is replaced by "?" here
    text = json.dumps(values, ensure_ascii=False).encode("utf-8", errors="replace")
    built: T = _adapter(cast(Any, cls)).validate_json(text, strict=True)
    return built


def _without(value: Any, path: list[str]) -> Any:
    """`value` without the entry at `path`. A list with an invalid value is removed entirely."""
    if not path or not isinstance(value, dict) or path[0] not in value:
        return value
    key, *rest = path
    if rest and isinstance(value[key], dict):
        return {**value, key: _without(value[key], rest)}
    return {name: item for name, item in value.items() if name != key}


def _with(values: dict[str, Any], path: list[str], value: object) -> dict[str, Any]:
    key, *rest = path
    return {**values, key: _with(values.get(key, {}), rest, value) if rest else value}


def _keys(path: str) -> list[str]:
    """The keys and list indexes in a dotted path."""
    return re.findall(r"[^.\[\]]+", path)


def describe(problem: Problem, document: Document, resolved: object = None) -> Mistake:
    """The message for a problem: origin of the value, its path and value, the reason, and what to do.

    A value that is not in the document is looked up in `resolved`, the configuration with its defaults. If the value is
    from a preset or a default and conflicts with a key that the user set, the origin is that key's.
    """
    value = document.get(problem.path)
    where = document.origin(problem.path)
    if where is None:
        where = "default" if resolved is not None else document.nearest_origin(problem.path)
        value = _attribute(resolved, problem.path)
    is_silent = _is_private(problem.path) or not _is_value(value) or (where == "default" and value is None)
    shown = "" if is_silent else f" = {show(value)}"
    hint = f"; {problem.hint}" if problem.hint else ""
    if where.startswith("--") and not where.startswith("--set"):  # an option that sets one key
        line = f"{where}{'' if is_silent else f' {show(value)}'} {problem.reason}{hint}"
        return Mistake.of(line, where, problem.path, problem.reason, problem.hint)
    path = problem.path if len(problem.path) <= 120 else problem.path[:117] + "..."
    path = path if path.isprintable() else ascii(path)
    if _is_not_the_users(where) and (chosen := _conflicting_origin(problem, document)):
        shown += "" if is_silent else f" ({where})"
        where = chosen
    line = f"{where}: {path or 'the file'}{shown} {problem.reason}{hint}"
    return Mistake.of(line, where, problem.path, problem.reason, problem.hint)


def show(value: object) -> str:
    """A value as written in a run file, on one short line."""
    text = (
        value
        if isinstance(value, str) and re.fullmatch(r"[\w./:@+,=-]+", value)
        else json.dumps(value, default=str)
    )
    return text if len(text) <= 80 else text[:77] + "..."


def _is_not_the_users(origin: str) -> bool:
    return origin == "default" or origin.startswith("preset ")


def _conflicting_origin(problem: Problem, document: Document) -> str | None:
    """The origin of the first key in the problem's reason that the user set."""
    origins = map(document.origin, re.findall(r"\b[a-z]\w*(?:\.\w+)+", problem.reason))
    return next((origin for origin in origins if origin and not _is_not_the_users(origin)), None)


def _is_value(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple)


def _is_private(path: str) -> bool:
    """Returns True for values that are never printed: environment variables and URLs may contain secrets."""
    return path.startswith(("environment.", "data.corpus.source.url")) or path.endswith(".api_key")


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
            yield _problem(cls, detail)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _problem(cls: type, detail: Any) -> Problem:
    path, names = "", []
    for part in detail["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":
            path = f"{path}.{part}" if path else part
            names.append(part)
    kind = detail["type"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return _unknown_key(cls, path, names)
    if kind in ("missing", "missing_argument"):
        return Problem(path, "is missing")
    if kind == "literal_error":
        choices = [choice.strip("'") for choice in re.split(r", | or ", detail["ctx"]["expected"])]
        return Problem(path, f"must be {one_of(choices)}", _meant(str(detail["input"]), choices))
    reason = f"must be {EXPECTED[kind]}" if kind in EXPECTED else str(detail["msg"]).lower()
    if kind in ("dataclass_type", "dataclass_exact_type") and isinstance(detail["input"], str):
        return Problem(path, reason, _write(_as_mapping(cls, path, names, detail["input"])))
    if kind == "tuple_type" and isinstance(detail["input"], str):
        return Problem(path, reason, _write(_as_list(cls, path, names, detail["input"])))
    return Problem(path, reason)


def _write(yaml: str) -> str:
    return f"write {yaml}" if yaml else ""


def _as_mapping(cls: type, path: str, names: list[str], text: str) -> str:
    """The mapping for `text` in place of a section. Empty unless the section has exactly one required key."""
    fields = dataclasses.fields(_section(cls, names))
    needed = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]
    if len(needed) != 1 or _is_private(path):
        return ""
    [name] = needed
    is_list = typing.get_origin(_hint_of(cls, [*names, name])) is tuple
    value = _as_list(cls, f"{path}.{name}", [*names, name], text) if is_list else show(text)
    return f"{{{name}: {value}}}"


def _as_list(cls: type, path: str, names: list[str], text: str) -> str:
    """The list for `text` in place of a list: a command's words, as a shell would split them, or one item."""
    if path.endswith("command"):
        try:
            return json.dumps(shlex.split(text))
        except ValueError:  # a quote without its partner
            return "its words as a list, such as [python, train.py]"
    if _section(cls, names) is not None:
        item = _as_mapping(cls, path, names, text)
        return f"[{item}]" if item else ""
    return "" if _has_numbers(_hint_of(cls, names)) else json.dumps([text])


def _section(cls: type, names: list[str]) -> Any:
    """The dataclass at a path of keys below `cls`."""
    return inner_class(_hint_of(cls, names))


def _hint_of(cls: type, names: list[str]) -> Any:
    """The type hint at a path of keys below `cls`."""
    hint: Any = cls
    for name in names:
        is_key = typing.get_origin(hint) is dict  # the name is a key of a mapping, not a field
        hint = typing.get_args(hint)[1] if is_key else field_hints(inner_class(hint))[name]
    return hint


def _has_numbers(hint: Any) -> bool:
    return hint in (int, float) or any(map(_has_numbers, typing.get_args(hint)))


def _unknown_key(cls: type, path: str, names: list[str]) -> Problem:
    """The problem of a key that its section does not have.

    The hint is, in this order: the section that has the key; the key that has this name in another program; a key of
    the section with a similar spelling; all keys of the section.
    """
    name = names[-1]
    known = sorted(field.name for field in dataclasses.fields(_section(cls, names[:-1])))
    similar = did_you_mean(name, known)
    is_translated = len(names) == 1 or names[0] in TRANSLATED_SECTIONS
    advice = _known_elsewhere(cls, name, similar) if is_translated else ""
    keys = f"known keys are {', '.join(known)}"
    if "extra_directives" in known:
        keys += "; for other options of sbatch, use extra_directives"
    advice = advice or similar or keys
    return Problem(path, "is not a known key", advice)


def _known_elsewhere(cls: type, name: str, similar: str) -> str:
    """The hint for a name that another section, or another program, has. Empty for a cluster profile."""
    hints = field_hints(cls)
    sections = {key: inner_class(hints[key]) for key in TRANSLATED_SECTIONS if key in hints}
    plain = name.lstrip("-").replace("-", "_")
    paths = [f"{key}.{plain}" for key, section in sections.items() if plain in field_hints(section)]
    if paths:
        return f"use {one_of(paths)}"
    return spellings.answer(plain, similar) if sections else ""


def inner_class(hint: Any) -> Any:
    """The dataclass in `X | None`, `tuple[X, ...]`, `dict[str, X]`, or one of these in Annotated."""
    if typing.get_origin(hint) is Annotated:
        return inner_class(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (Union, types.UnionType, tuple, dict):
        return next(filter(None, (inner_class(arg) for arg in reversed(typing.get_args(hint)))), None)
    return hint if dataclasses.is_dataclass(hint) else None


def _meant(value: str, choices: list[str]) -> str:
    """A hint with the value that was probably intended, by spelling or by MEANT."""
    meant = MEANT.get(value.lower())
    return did_you_mean(meant if meant in choices else value, choices)


def check_text(cls: type, values: dict[str, Any], origin: str) -> None:
    """Checks values against the constraints of `cls`. Keys may be missing.

    Raises:
        ConfigErrors: values are invalid. Lists all of them.
    """
    document = constant(values, origin)
    messages = [describe(problem, document) for problem in constraint_problems(cls, values)]
    if messages:
        raise ConfigErrors(messages)
