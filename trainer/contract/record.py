"""Frozen dataclasses that take little time to define: records, and sections of a configuration."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, overload

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform as dataclass_transform
else:  # in typing since Python 3.11

    def dataclass_transform(**options: Any) -> Any:
        """Marks a decorator for type checkers. Does nothing at runtime."""
        return lambda decorator: decorator


T = TypeVar("T")


@overload
def record(cls: type[T], /) -> type[T]: ...
@overload
def record(*, kw_only: bool = False, eq: bool = True) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def record(cls: Any = None, /, *, kw_only: bool = False, eq: bool = True) -> Any:
    """Makes a frozen dataclass, as `dataclass(frozen=True)` does.

    All records share the methods below. `dataclass` would compile six functions for each class, which took a third of
    the time of `hpcgen render`.
    """
    if cls is None:
        return functools.partial(_made, kw_only=kw_only, eq=eq)
    return _made(cls, kw_only=kw_only, eq=eq)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def config_section(cls: type[T]) -> type[T]:
    """Makes a keyword-only record. pydantic refuses unknown keys for it."""
    cls.__pydantic_config__ = {"extra": "forbid"}  # type: ignore[attr-defined]
    return record(kw_only=True)(cls)


def replaced(record: T, **values: Any) -> T:
    """A copy with other values, as `dataclasses.replace` makes it. Takes a fifth of its time."""
    shape = _shape(cast(Hashable, type(record)))
    if unknown := values.keys() - shape.names:
        raise TypeError(f"{type(record).__name__} has no field {', '.join(sorted(unknown))}")
    copy = object.__new__(type(record))
    kept = {name: value for name, value in vars(record).items() if name in shape.names}
    vars(copy).update(kept, **values)
    if shape.post_init:
        cast(Any, copy).__post_init__()
    return copy


def _made(cls: Any, *, kw_only: bool, eq: bool) -> Any:
    methods = (_init, _setattr, _delattr, _repr, *((_eq, _hash) if eq else ()))
    for method in methods:
        name = f"__{method.__name__[1:]}__"
        if name not in vars(cls):
            setattr(cls, name, method)
    return dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)


class _Shape(NamedTuple):
    """The facts about a class that the shared methods need."""

    names: frozenset[str]
    positional: tuple[str, ...]
    defaults: dict[str, Any]
    factories: tuple[tuple[str, Callable[[], Any]], ...]
    post_init: bool
    compared: Callable[[Any], Any]
    """Returns the values of a record that take part in comparisons."""


@functools.cache
def _shape(cls: Hashable) -> _Shape:
    fields, missing = dataclasses.fields(cast(Any, cls)), dataclasses.MISSING
    compared = [field.name for field in fields if field.compare]
    return _Shape(
        names=frozenset(field.name for field in fields),
        positional=tuple(field.name for field in fields if not field.kw_only),
        defaults={field.name: field.default for field in fields if field.default is not missing},
        factories=tuple(
            (field.name, field.default_factory) for field in fields if field.default_factory is not missing
        ),
        post_init=hasattr(cls, "__post_init__"),
        compared=operator.attrgetter(*compared) if compared else lambda record: (),
    )


def _init(self: Any, *args: Any, **given: Any) -> None:
    shape = _shape(cast(Hashable, type(self)))
    values = vars(self)
    values.update(shape.defaults)
    values.update(zip(shape.positional, args, strict=False))
    values.update(given)
    for name, factory in shape.factories:
        if name not in values:
            values[name] = factory()
    if values.keys() != shape.names or (args and (given or len(args) > len(shape.positional))):
        _check_arguments(type(self).__name__, shape, args, given)
    if shape.post_init:
        self.__post_init__()


def _check_arguments(name: str, shape: _Shape, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Raises TypeError for arguments that are missing, unknown or given twice."""
    if len(args) > len(shape.positional):
        raise TypeError(
            f"{name}() takes {len(shape.positional)} positional arguments, {len(args)} were given"
        )
    by_position = shape.positional[: len(args)]
    if twice := given.keys() & set(by_position):
        raise TypeError(f"{name}() got two values for {', '.join(sorted(twice))}")
    if unknown := given.keys() - shape.names:
        raise TypeError(f"{name}() has no argument {', '.join(sorted(unknown))}")
    optional = {*by_position, *given, *shape.defaults, *dict(shape.factories)}
    if missing := shape.names - optional:
        raise TypeError(f"{name}() lacks {', '.join(sorted(missing))}")


def _setattr(self: object, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _delattr(self: object, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _eq(self: Any, other: object) -> bool:
    compared = _shape(cast(Hashable, type(self))).compared
    return compared(self) == compared(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_shape(cast(Hashable, type(self))).compared(self))


def _repr(self: Any) -> str:
    shown = (field.name for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"
