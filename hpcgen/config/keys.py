"""The keys of a document: their paths, their type hints, and the documentation below each."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Union

from trainer.contract.config import field_hints


def inner_class(hint: Any) -> Any:
    """The dataclass in `X | None`, `tuple[X, ...]`, `dict[str, X]`, or one of these in Annotated."""
    if typing.get_origin(hint) is Annotated:
        return inner_class(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (Union, types.UnionType, tuple, dict):
        return next(filter(None, (inner_class(arg) for arg in reversed(typing.get_args(hint)))), None)
    return hint if dataclasses.is_dataclass(hint) else None


def hint_of(cls: type, names: Sequence[str]) -> Any:
    """The type hint at a path of keys below `cls`."""
    hint: Any = cls
    for name in names:
        is_key = typing.get_origin(hint) is dict  # the name is a key of a mapping, not a field
        hint = typing.get_args(hint)[1] if is_key else field_hints(inner_class(hint))[name]
    return hint


def section_of(cls: type, names: Sequence[str]) -> Any:
    """The dataclass at a path of keys below `cls`."""
    return inner_class(hint_of(cls, names))


@functools.cache
def key_paths(cls: type) -> tuple[str, ...]:
    """The dotted paths of all keys below `cls`, except those in lists and mappings."""
    return tuple(_walk(cls, ""))


def _walk(cls: type, prefix: str) -> Iterator[str]:
    for name, hint in field_hints(cls).items():
        yield f"{prefix}{name}"
        inner = inner_class(hint)
        if inner is not None and typing.get_origin(hint) not in (tuple, dict):
            yield from _walk(inner, f"{prefix}{name}.")


def required_keys(cls: Any) -> list[str]:
    """The names of the fields without a default."""
    missing = dataclasses.MISSING
    return [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is missing and field.default_factory is missing
    ]


def defaults(cls: type) -> dict[str, Any]:
    """Dotted path -> default, for all keys below `cls` that have one, also in sections that a file must have."""
    found: dict[str, Any] = {}
    hints = field_hints(cls)
    for field in dataclasses.fields(cls):
        factory = field.default_factory
        value = field.default if factory is dataclasses.MISSING else factory()
        section = type(value) if dataclasses.is_dataclass(value) else hints[field.name]
        if isinstance(section, type) and dataclasses.is_dataclass(section):
            inner = defaults(section)
            found |= {f"{field.name}.{path}": default for path, default in inner.items()}
        elif value is not dataclasses.MISSING:
            found[field.name] = value
    return found


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string literal below the field, including those of base classes, or the field's metadata."""
    docs = {field.name: field.metadata["doc"] for field in dataclasses.fields(cls) if "doc" in field.metadata}
    for base in reversed(cls.__mro__[:-1]):
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, following in zip(definition.body, definition.body[1:], strict=False):
            match field, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(sentence))
                ):
                    docs[name] = " ".join(sentence.split())
    return docs
