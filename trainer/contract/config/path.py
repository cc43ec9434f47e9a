"""Words in the type of a key whose value names a file or a directory, and a walk over these values.

Relative paths start at the directory of the run file. hpcgen makes them absolute, so the trainer's configuration
contains only absolute ones.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, NamedTuple, TypeVar, Union

from trainer.contract.config.resume import field_hints

T = TypeVar("T")


class PathKind(Enum):
    """How a text names a file or a directory."""

    PATH = "by its path"
    FUNCTION = "as the file of a function, FILE.py:function; package.module:function names none"
    TASK = "as the file of a task of lm-eval; the name of a task names none"
    IN_RUN_DIR = "by a path that can begin with {RUN_DIR}/"
    PATTERN = "by a path with wildcards that can begin with {RUN_DIR}/"


FilePath = Annotated[str, PathKind.PATH]
FunctionPath = Annotated[str, PathKind.FUNCTION]
TaskName = Annotated[str, PathKind.TASK]


class NamedPath(NamedTuple):
    """A value of a section that names a file or a directory."""

    key: str
    """Dotted key, such as data.train[0].prefix."""
    kind: PathKind
    text: str


def paths_in(section: Any, key: str = "", cls: type | None = None) -> Iterator[NamedPath]:
    """Yields the values that name files, in a section and its subsections. `key` is the key of the section.

    A section can also be plain data that `cls` describes.
    """
    found: list[NamedPath] = []

    def unchanged(named: NamedPath) -> str:
        found.append(named)
        return named.text

    _mapped(cls or type(section), section, key, unchanged)
    yield from found


def with_paths(section: T, change: Callable[[NamedPath], str]) -> T:
    """The section with `change` applied to each value that names a file. Null stays null."""
    changed: T = _mapped(type(section), section, "", change)
    return changed


@functools.cache
def _has_paths(hint: Any) -> bool:
    """True if values of a type can name files."""
    if typing.get_origin(hint) is Annotated:
        return any(isinstance(word, PathKind) for word in hint.__metadata__) or _has_paths(hint.__origin__)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return any(map(_has_paths, field_hints(hint).values()))
    return any(map(_has_paths, typing.get_args(hint)))


def _mapped(hint: Any, value: Any, key: str, change: Callable[[NamedPath], str]) -> Any:
    if value is None or not _has_paths(hint):
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        kind = next((word for word in hint.__metadata__ if isinstance(word, PathKind)), None)
        return change(NamedPath(key, kind, value)) if kind else _mapped(arguments[0], value, key, change)
    if origin in (Union, types.UnionType):
        [inner] = [argument for argument in arguments if argument is not type(None)]
        return _mapped(inner, value, key, change)
    if origin is tuple:
        return tuple(
            _mapped(arguments[0], item, f"{key}[{index}]", change) for index, item in enumerate(value)
        )
    if not dataclasses.is_dataclass(hint):
        return value
    hints = field_hints(typing.cast(type, hint))
    is_plain = isinstance(value, Mapping)
    values = value if is_plain else {name: getattr(value, name) for name in hints}
    changed = {
        name: _mapped(hints.get(name), inner, f"{key}.{name}" if key else name, change)
        for name, inner in values.items()
    }
    if changed == values:
        return value
    return changed if is_plain else dataclasses.replace(value, **changed)
