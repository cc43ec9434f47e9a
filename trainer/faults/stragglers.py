"""Finds stragglers: ranks that compute more slowly than others with the same work.

Typical causes are a hot GPU, a shared core or a faulty node.
"""

from __future__ import annotations

import dataclasses
import socket
import statistics
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.contract.wording import rank_list
from trainer.distributed.rendezvous import Ranks
from trainer.metrics.timers import Timers

CHECK_INTERVAL = 50
"""Steps between two comparisons. Each comparison waits once for the GPU and for all ranks."""

WARMUP_STEPS = 5
"""First steps of an attempt to ignore: ranks compile kernels and allocate memory at different speeds."""

SLOW = 1.1
"""Multiple of the median above which a rank, or a group of ranks that wait for each other, counts as slow."""

MAX_REPORTED = 8
"""Maximum number of stragglers to report. More than that do not point to a single machine."""


@dataclass(frozen=True)
class RankLocation:
    """Location of a rank: its host, and the part of the model that it computes."""

    host: str
    local_rank: int
    pipeline_stage: int
    together: tuple[int, ...]
    """Ranks, including this one, that wait for each other in every layer. If one of them is slow, all of them are."""
    waiting: str = ""
    """Kinds of parallelism in which they wait: tensor, context or expert; empty for a single rank."""


@dataclass(frozen=True)
class Straggler:
    """A slow rank, or a slow group of ranks that wait for each other."""

    ranks: tuple[int, ...]
    places: tuple[RankLocation, ...]
    """One for each rank."""
    seconds: float
    """Compute time per step of the slowest of these ranks. The others are nearly the same."""
    median: float
    """Median compute time per step of the ranks, or groups of ranks, in the same pipeline stage."""

    @property
    def slowdown(self) -> float:
        """Ratio of `seconds` to the median."""
        return self.seconds / self.median

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of the ranks, without duplicates."""
        return tuple(dict.fromkeys(place.host for place in self.places))

    def __str__(self) -> str:
        first = self.places[0]
        if len(self.ranks) == 1:
            who = f"rank {self.ranks[0]} ({first.host}, local rank {first.local_rank}) computes"
        else:
            who = (
                f"{rank_list(self.ranks)} ({', '.join(self.hosts)}), which wait for each other in {first.waiting}, "
                "compute"
            )
        return (
            f"{who} for {self.seconds:.3f} s per step, {self.slowdown:.2f} times the median of pipeline stage "
            f"{first.pipeline_stage} ({self.median:.3f} s)"
        )


def find_stragglers(seconds: Sequence[float], places: Sequence[RankLocation]) -> list[Straggler]:
    """Ranks above SLOW times the median of their pipeline stage, slowest first.

    `seconds` is the compute time per step of each rank. Ranks that wait for each other count as one. With two values,
    the smaller one is the median.
    """
    slowest = {ranks: max(seconds[rank] for rank in ranks) for ranks in (place.together for place in places)}
    stages: dict[int, list[float]] = defaultdict(list)
    for ranks, own in slowest.items():
        stages[places[ranks[0]].pipeline_stage].append(own)
    medians = {stage: statistics.median_low(values) for stage, values in stages.items()}
    found = [
        Straggler(ranks, tuple(places[rank] for rank in ranks), own, median)
        for ranks, own in slowest.items()
        if own > SLOW * (median := medians[places[ranks[0]].pipeline_stage]) > 0
    ]
    return sorted(found, key=lambda straggler: -straggler.slowdown)[:MAX_REPORTED]


def gather_places(ranks: Ranks, groups: ProcessGroupCollection) -> list[RankLocation]:
    """Location of each rank, in order. Every rank must call this."""
    named = {"tensor": groups.tp, "context": groups.cp, "expert": groups.ep}
    kinds = [name for name, group in named.items() if group.size() > 1]
    members = {
        rank
        for group in (groups.tp_cp, groups.tp_ep)
        for rank in torch.distributed.get_process_group_ranks(group)
    }
    own = RankLocation(
        socket.gethostname(),
        ranks.local_rank,
        groups.pp.rank(),
        tuple(sorted(members)),
        f"{' and '.join(kinds)} parallelism" if kinds else "",
    )
    places = [own] * ranks.world_size
    torch.distributed.all_gather_object(places, own)
    connected = connected_groups(place.together for place in places)
    waiting_for = {rank: group for group in connected for rank in group}
    return [dataclasses.replace(place, together=waiting_for[rank]) for rank, place in enumerate(places)]


def connected_groups(groups: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The `groups`, where groups that share a rank are merged: ranks of experts wait for the ranks of other layers."""
    merged: list[set[int]] = []
    for group in set(groups):
        apart = [each for each in merged if each.isdisjoint(group)]
        overlapping = [each for each in merged if not each.isdisjoint(group)]
        merged = [*apart, set(group).union(*overlapping)]
    return [tuple(sorted(group)) for group in merged]


class StragglerWatch:
    """Compares the compute times of all ranks at regular intervals."""

    def __init__(self, timers: Timers, places: list[RankLocation], rank: int, device: str) -> None:
        self._timers, self._places, self._rank, self._device = timers, places, rank, device
        self._steps = 0
        self._since = timers.totals()

    def step(self) -> list[Straggler]:
        """Count a step. Every CHECK_INTERVAL steps, return the stragglers; else an empty list. Every rank calls this.

        A straggler prints the state of its GPU. Among ranks that wait for each other, this shows which one is slow.
        """
        self._steps += 1
        if self._steps == WARMUP_STEPS:
            self._since = self._timers.totals()
        if len(self._places) == 1 or self._steps % CHECK_INTERVAL:
            return []
        since = WARMUP_STEPS if self._steps == CHECK_INTERVAL else 0
        totals = self._timers.totals()
        own = (totals - self._since).compute_s / (CHECK_INTERVAL - since)
        self._since = totals
        found = find_stragglers(self._share(own), self._places)
        if self._device == "cuda" and any(self._rank in straggler.ranks for straggler in found):
            # Read here, since the current device of a new thread is the first GPU.
            gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            threading.Thread(target=_print_gpu, args=(self._rank, f"GPU-{gpu}"), daemon=True).start()
        return found

    def _share(self, own: float) -> list[float]:
        seconds = torch.zeros(len(self._places), dtype=torch.float64, device=self._device)
        seconds[self._rank] = own
        torch.distributed.all_reduce(seconds)
        return seconds.tolist()


def _print_gpu(rank: int, uuid: str) -> None:
    """Print one line on this rank's GPU. Runs in a thread, since nvidia-smi can take long on a faulty node."""
    fields = "pci.bus_id,temperature.gpu,clocks.sm,clocks.max.sm,power.draw,clocks_throttle_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", uuid]
    try:
        state = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        state = f"nvidia-smi failed ({error})"
    print(f"rank {rank} ({socket.gethostname()}): GPU state ({fields}): {state}", flush=True)
