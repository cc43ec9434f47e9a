"""Words in the type of a key that say whether a resumed run may change it.

A key without a word may change if `checkpoint.changed` names it.
"""

from __future__ import annotations

import functools
import typing
from enum import Enum
from typing import Annotated, Any, TypeVar

T = TypeVar("T")


class Resume(Enum):
    """Effect of a key, which decides whether a resumed run may change it."""

    FREE = "affects speed, length or reports of the run, but not what is learned"
    FIXED = "determines the shape or the meaning of the weights"
    GROUPED = "determines the grouping of the optimizer state"


Free = Annotated[T, Resume.FREE]
"""A key that a resumed run may change without naming it."""
Fixed = Annotated[T, Resume.FIXED]
"""A key that must not change."""
Grouped = Annotated[T, Resume.GROUPED]
"""A key that can only change together with a new optimizer state."""


@functools.cache
def field_hints(cls: type) -> dict[str, Any]:
    """Type of each field of a dataclass, with its constraints, but without its word."""
    return {name: _without_word(hint) for name, hint in _all_hints(cls).items()}


def resume_words(cls: type) -> dict[str, Resume]:
    """The resume word of each field of a dataclass, if it has one."""
    found = {name: _word(hint) for name, hint in _all_hints(cls).items()}
    return {name: word for name, word in found.items() if word is not None}


@functools.cache
def _all_hints(cls: type) -> dict[str, Any]:
    """Evaluated once, because this is slow."""
    return typing.get_type_hints(cls, include_extras=True)


def _word(hint: Any) -> Resume | None:
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Resume)), None)


def _without_word(hint: Any) -> Any:
    """`Fixed[Count | None]` hides the union, and `Fixed[Count]` has the range of Count next to its word."""
    word = _word(hint)
    if word is None:
        return hint
    inner, *others = typing.get_args(hint)
    parts = (inner, *(each for each in others if each is not word))
    return Annotated[parts] if len(parts) > 1 else inner  # Python 3.10 cannot unpack in the brackets
