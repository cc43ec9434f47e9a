"""Decorator for configuration classes."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from trainer.contract.record import dataclass_transform, record

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def config_section(cls: type[T]) -> type[T]:
    """Makes a keyword-only record. pydantic refuses unknown keys for it."""
    cls.__pydantic_config__ = {"extra": "forbid"}  # type: ignore[attr-defined]
    return record(kw_only=True)(cls)
