"""The bandwidth of an all-reduce, as NVIDIA's nccl-tests define it.

The algorithm bandwidth is S / t for a message of S bytes and a time of t seconds. The bus bandwidth, S / t x
2 (n - 1) / n, is what each of the n ranks sends and receives, so that it can be compared with the hardware's and
between numbers of ranks: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

WARM_UP = 3
"""All-reduces before the clock counts: the first ones open connections and choose algorithms."""
LONGEST_S = 10.0
"""Time that the iterations of one size may take together."""
FEWEST = 3


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One size, measured."""

    size_bytes: int
    time_s: float
    algbw_gb_s: float
    busbw_gb_s: float
    correct: bool
    """Whether the sums were right."""


def make_sample(size_bytes: int, time_s: float, num_ranks: int, correct: bool = True) -> Sample:
    """The bandwidths of an all-reduce of `size_bytes` over `num_ranks` ranks that took `time_s`."""
    algbw = size_bytes / time_s / 1e9
    return Sample(
        size_bytes=size_bytes,
        time_s=time_s,
        algbw_gb_s=algbw,
        busbw_gb_s=algbw * 2 * (num_ranks - 1) / num_ranks,
        correct=correct,
    )


def measure_all_reduce(group: ProcessGroup, size_bytes: int, device: torch.device, iterations: int) -> Sample:
    """Measures all-reduces of fp32 sums over `group`, which every rank of it calls at the same time.

    The time is the median over the iterations, of the slowest rank: the same on every rank.
    """
    buffer = torch.empty(max(size_bytes // 4, 1), dtype=torch.float32, device=device)
    correct = _sums_are_right(buffer, group)
    warm_up = _over_ranks(statistics.median(_times(buffer, group, WARM_UP)), group, device)
    count = max(FEWEST, min(iterations, int(LONGEST_S / warm_up)))
    median = _over_ranks(statistics.median(_times(buffer, group, count)), group, device)
    wrong = _over_ranks(0.0 if correct else 1.0, group, device)
    return make_sample(buffer.numel() * 4, median, group.size(), correct=wrong == 0.0)


def _sums_are_right(buffer: torch.Tensor, group: ProcessGroup) -> bool:
    """Adds 1, 2, ..., n, which fp32 holds exactly up to thousands of ranks."""
    buffer.fill_(float(group.rank() + 1))
    all_reduce(buffer, group=group)
    expected = group.size() * (group.size() + 1) / 2
    smallest, largest = torch.aminmax(buffer)
    right = smallest.item() == expected == largest.item()
    buffer.zero_()  # sums of sums would grow without end
    return right


def _times(buffer: torch.Tensor, group: ProcessGroup, count: int) -> list[float]:
    """Seconds that each of `count` all-reduces in a row took on this rank."""
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


def _over_ranks(value: float, group: ProcessGroup, device: torch.device) -> float:
    """The largest of the ranks' values."""
    box = torch.tensor([value], dtype=torch.float64, device=device)
    all_reduce(box, op=ReduceOp.MAX, group=group)
    return float(box.item())
