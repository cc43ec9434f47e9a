"""One look at each of very many files, such as records: in seconds, on network file systems as well."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")
_THREADS = 32
_AT_ONCE = 64
"""Items that a thread looks at in one go: a single one is often less work than handing it over."""
_SLOW_LOOK_S = 0.0005
"""Threads wait for storage that takes this long for a look; where it is quicker, they are in each other's way."""


def of_each(items: Sequence[_Item], look: Callable[[_Item], _Found]) -> list[_Found]:
    """`look` of each item, in their order: one after the other, or by many threads where the first looks are slow."""
    started = time.monotonic()
    found: list[_Found] = []
    for item in items[:_THREADS]:
        found.append(look(item))
        if time.monotonic() - started >= _SLOW_LOOK_S * _THREADS:
            break
    left = items[len(found) :]
    if not left or time.monotonic() - started < _SLOW_LOOK_S * len(found):
        return found + [look(item) for item in left]
    size = min(_AT_ONCE, -(-len(left) // _THREADS))
    parts = [left[begin : begin + size] for begin in range(0, len(left), size)]
    with ThreadPoolExecutor(_THREADS) as threads:
        for part in threads.map(lambda part: [look(item) for item in part], parts):
            found += part
    return found
