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
    """Makes a frozen, keyword-only dataclass. pydantic refuses unknown keys for it."""
    cls.__pydantic_config__ = {"extra": "forbid"}  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)
