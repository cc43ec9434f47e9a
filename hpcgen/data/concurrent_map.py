"""Processing of very many small files, such as records, within seconds even on network file systems."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_THREADS = 32
_CHUNK_ITEMS = 64
"""Items per call of a thread, because handing over a single item often costs more than processing it."""
_SLOW_CALL_S = 0.0005
"""Mean time per call above which threads help. Slower calls wait for storage; faster ones compete for the GIL."""


def concurrent_map(items: Sequence[_Item], function: Callable[[_Item], _Result]) -> list[_Result]:
    """Returns the result of `function` for each item, in order. Uses threads only if the first calls are slow."""
    started = time.monotonic()
    results: list[_Result] = []
    for item in items[:_THREADS]:
        results.append(function(item))
        if time.monotonic() - started >= _SLOW_CALL_S * _THREADS:
            break
    left = items[len(results) :]
    if not left or time.monotonic() - started < _SLOW_CALL_S * len(results):
        return results + [function(item) for item in left]
    from concurrent.futures import ThreadPoolExecutor  # it imports slowly, and is rarely needed

    size = min(_CHUNK_ITEMS, -(-len(left) // _THREADS))
    chunks = [left[begin : begin + size] for begin in range(0, len(left), size)]
    with ThreadPoolExecutor(_THREADS) as threads:
        for chunk in threads.map(lambda chunk: [function(item) for item in chunk], chunks):
            results += chunk
    return results
