"""A difference between the configuration of an attempt and the one that its checkpoint was saved with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Change:
    """A hyperparameter that differs from the checkpoint's."""

    name: str
    """Section and key, such as "optimizer.lr"."""
    before: Any
    """Value in the checkpoint, as in JSON."""
    after: Any
    is_content: bool = False
    """True if only the content of a file differs. `before` and `after` then describe the file."""

    def __str__(self) -> str:
        return f"{self.name}: {show(self.before)} -> {show(self.after)}"


def and_more(count: int) -> str:
    """Suffix for a description of the first of `count` changed files."""
    return f" (and {count - 1} more)" if count > 1 else ""


def show(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, Mapping):
        value = {key: each for key, each in value.items() if each is not None}
    return value if isinstance(value, str) else json.dumps(value)
