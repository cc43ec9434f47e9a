"""Times kernels: sustained, with data that is not in the GPU's cache, and without waiting for the host."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

CHUNK_S = 0.01
"""Calls are timed together for about this long."""
WARM_CALLS = 3
COLD_BYTES = 256 * 2**20
"""Kernels cycle through copies of their data with this size in total, so that no copy stays in the cache (50 MB on an
H100), as in a step that touches gigabytes in between."""
MAX_COPIES = 16
CALLS_PER_RUN = 16

Call = Callable[[], object]


def copies(num_bytes: int) -> int:
    """Number of copies of a kernel's data, of `num_bytes` bytes each."""
    return min(MAX_COPIES, max(1, math.ceil(COLD_BYTES / num_bytes)))


def measure(calls: Sequence[Call], seconds: float, device: str, *, graph: bool = True) -> dict[str, Any]:
    """Median time of a call in microseconds as `us`. The calls run one after another, again and again, for `seconds`.

    With `graph`, they are recorded as a CUDA graph, so that short kernels do not wait for the host. Otherwise, or if
    they cannot be recorded, such waits count, and the result has `host_launches`.
    """
    for _ in range(WARM_CALLS):
        for call in calls:
            call()
    if device == "cpu":
        return {"us": _on_cpu(calls, seconds)}
    number = len(calls) * max(1, CALLS_PER_RUN // len(calls))
    run = _recorded(calls, number) if graph else None
    if run is None:
        return {"us": _on_gpu(lambda: _all(calls, number), seconds) / number * 1e6, "host_launches": True}
    return {"us": _on_gpu(run, seconds) / number * 1e6}


@dataclass(frozen=True)
class Passes:
    """A kernel with a backward pass, such as a function with autograd."""

    forward: Call
    both: Call
    """Forward and backward pass."""


def measure_pass(
    passes: Sequence[Passes], which: str, seconds: float, device: str, *, graph: bool = True
) -> dict[str, Any]:
    """Median time of the forward pass, or of the backward pass as the difference of both and the forward one.

    Transformer Engine's backward passes cannot run twice.
    """
    forward = measure([each.forward for each in passes], seconds, device, graph=graph)
    if which == "forward":
        return forward
    both = measure([each.both for each in passes], seconds, device, graph=graph)
    return both | {"us": both["us"] - forward["us"]}


def _all(calls: Sequence[Call], number: int) -> None:
    for index in range(number):
        calls[index % len(calls)]()


def _on_cpu(calls: Sequence[Call], seconds: float) -> float:
    times = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - start) / len(calls))
    return statistics.median(times) * 1e6


def _recorded(calls: Sequence[Call], number: int) -> Call | None:
    """Return a function that replays the calls; None if a CUDA graph cannot hold them."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # Backward passes run on the stream of their forward passes, which is the current one.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            _all(calls, number)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def _on_gpu(run: Call, seconds: float) -> float:
    """Median seconds of a run."""
    once = _elapsed(run, 1, 2)[-1]
    per_chunk = max(1, round(CHUNK_S / once))
    times = _elapsed(run, per_chunk, max(4, round(seconds / (once * per_chunk))))
    return statistics.median(times[1:]) / per_chunk


def _elapsed(run: Call, per_chunk: int, chunks: int) -> list[float]:
    """Seconds of each chunk. The GPU never waits between them."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(chunks + 1)]
    events[0].record()
    for event in events[1:]:
        for _ in range(per_chunk):
            run()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(events)]
