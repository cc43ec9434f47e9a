"""Parameters of a test of which CI runs those that differ in kind, and `make test-slow` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def select(cases: Mapping[str, Any] | Iterable[str], often: Collection[str]) -> list[Any]:
    """Parameters by name, which are slow unless `often` has the name. A mapping has the values of each name."""
    values = cases if isinstance(cases, Mapping) else {name: name for name in cases}
    unknown = set(often) - values.keys()
    assert not unknown, f"no cases: {unknown}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            id=name,
            marks=() if name in often else pytest.mark.slow,
        )
        for name, value in values.items()
    ]
