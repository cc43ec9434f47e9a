"""Measures the bandwidth of an all-reduce, as defined by NVIDIA's nccl-tests.

The algorithm bandwidth is S / t for a message of S bytes and a time of t seconds. The bus bandwidth is S / t x
2 (n - 1) / n, which each of the n ranks sends and receives. It can be compared with the hardware's bandwidth, and
between numbers of ranks. Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

WARM_UP = 3
"""All-reduces before the measurement. The first ones open connections and choose algorithms."""
MAX_DURATION_S = 10.0
"""Maximum total time of the iterations of one size (seconds)."""
MIN_ITERATIONS = 3


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Measurement of one message size."""

    size_bytes: int
    time_s: float
    algbw_gb_s: float
    busbw_gb_s: float
    correct: bool
    """True if the sums were correct."""


def make_sample(size_bytes: int, time_s: float, num_ranks: int, correct: bool = True) -> Sample:
    """Compute the bandwidths of an all-reduce of `size_bytes` over `num_ranks` ranks that took `time_s`."""
    algbw = size_bytes / time_s / 1e9
    return Sample(
        size_bytes=size_bytes,
        time_s=time_s,
        algbw_gb_s=algbw,
        busbw_gb_s=algbw * 2 * (num_ranks - 1) / num_ranks,
        correct=correct,
    )


def measure_all_reduce(group: ProcessGroup, size_bytes: int, device: torch.device, iterations: int) -> Sample:
    """Measure all-reduces of fp32 sums over `group`. All its ranks must call this at the same time.

    The time is the median over the iterations on the slowest rank. The result is the same on every rank.
    """
    buffer = torch.empty(max(size_bytes // 4, 1), dtype=torch.float32, device=device)
    correct = _sums_are_correct(buffer, group)
    warm_up = _maximum(statistics.median(_times(buffer, group, WARM_UP)), group, device)
    count = max(MIN_ITERATIONS, min(iterations, int(MAX_DURATION_S / warm_up)))
    median = _maximum(statistics.median(_times(buffer, group, count)), group, device)
    wrong = _maximum(0.0 if correct else 1.0, group, device)
    return make_sample(buffer.numel() * 4, median, group.size(), correct=wrong == 0.0)


def _sums_are_correct(buffer: torch.Tensor, group: ProcessGroup) -> bool:
    """Check the sum 1 + 2 + ... + n, which is exact in fp32 up to thousands of ranks."""
    buffer.fill_(float(group.rank() + 1))
    all_reduce(buffer, group=group)
    expected = group.size() * (group.size() + 1) / 2
    smallest, largest = torch.aminmax(buffer)
    right = smallest.item() == expected == largest.item()
    buffer.zero_()  # repeated sums would overflow
    return right


def _times(buffer: torch.Tensor, group: ProcessGroup, count: int) -> list[float]:
    """Time of each of `count` consecutive all-reduces on this rank (seconds)."""
    if buffer.device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            all_reduce(buffer, group=group)
            mark.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]
    times = []
    for _ in range(count):
        start = time.perf_counter()
        all_reduce(buffer, group=group)
        times.append(time.perf_counter() - start)
    return times


def _maximum(value: float, group: ProcessGroup, device: torch.device) -> float:
    """The largest value of all ranks."""
    box = torch.tensor([value], dtype=torch.float64, device=device)
    all_reduce(box, op=ReduceOp.MAX, group=group)
    return float(box.item())
