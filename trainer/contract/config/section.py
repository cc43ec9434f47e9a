"""Decorator for configuration classes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # in typing since Python 3.11

    def dataclass_transform(**options: Any) -> Any:
        """Marks a decorator for type checkers. Does nothing at runtime."""
        return lambda decorator: decorator


T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def config_section(cls: type[T]) -> type[T]:
    """Makes a frozen, keyword-only dataclass. pydantic refuses unknown keys for it.

    All sections share the methods below. `dataclass` would compile six functions for each class, a sixth of the time
    that `hpcgen render` takes.
    """
    cls.__pydantic_config__ = {"extra": "forbid"}  # type: ignore[attr-defined]
    for method in (_init, _setattr, _delattr, _eq, _hash, _repr):
        setattr(cls, f"__{method.__name__[1:]}__", method)
    return dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)


def _init(self: Any, **given: Any) -> None:
    values = {}
    for field in dataclasses.fields(self):
        if field.name in given:
            values[field.name] = given.pop(field.name)
        elif field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
        else:
            raise TypeError(f"{type(self).__name__}() lacks the keyword argument {field.name}")
    if given:
        raise TypeError(f"{type(self).__name__}() has no keyword argument {', '.join(given)}")
    vars(self).update(values)
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def _setattr(self: object, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _delattr(self: object, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _values(section: Any) -> tuple[Any, ...]:
    return tuple(getattr(section, field.name) for field in dataclasses.fields(section))


def _eq(self: object, other: object) -> bool:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: object) -> int:
    return hash(_values(self))


def _repr(self: Any) -> str:
    values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self))
    return f"{type(self).__qualname__}({values})"
