"""Batch sizes that limit the layouts of a run: the number of data-parallel replicas divides the batch and the GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable

from hpcgen.config.loader import Run, with_values
from hpcgen.errors import HpcgenError, Problem
from hpcgen.planning.layouts.nodes import ladder
from hpcgen.run_plan.layouts.result import ORIGIN, NodesLayouts
from hpcgen.run_plan.layouts.sizes import most_nodes_of
from hpcgen.run_plan.plan import located_in
from hpcgen.text import counted
from trainer.contract.rules.batch import GLOBAL_BATCH

NEAR = 1 / 8
"""Largest relative difference of a batch size that is proposed."""


def with_batch(run: Run, size: int) -> Run:
    """The run with another global batch size."""
    return with_values(run, {GLOBAL_BATCH: size}, ORIGIN)


def better_batch(size: int, num_gpus: int) -> int | None:
    """The nearest batch size that allows the most replicas; None if no near one allows more."""
    near = range(math.ceil(size * (1 - NEAR)), math.floor(size * (1 + NEAR)) + 1)
    best = min(near, key=lambda other: (-math.gcd(other, num_gpus), abs(other - size)))
    return best if math.gcd(best, num_gpus) > math.gcd(size, num_gpus) else None


def batch_limit(found: NodesLayouts) -> str:
    """How the batch size limits the replicas of the first layout; empty unless a near batch size allows more."""
    first = found.first
    if first is None:
        return ""
    size = first.facts.training.global_batch_size
    most, better = math.gcd(size, found.num_gpus), better_batch(size, found.num_gpus)
    if better is None or first.layout.model_parallel_size * most < found.num_gpus:
        return ""
    replicas = counted(most, "data-parallel replica")
    return (
        f"{GLOBAL_BATCH} = {size} allows at most {replicas} on {found.num_gpus:,} GPUs, and {better} "
        f"allows {math.gcd(better, found.num_gpus)}, with which steps may be faster"
    )


def unsuitable_batch(found: NodesLayouts, has_valid: Callable[[Run], bool]) -> HpcgenError | None:
    """The error if no layout is valid because of the batch size: one is with a batch that all GPUs divide."""
    run, num_gpus = found.run, found.num_gpus
    if not has_valid(with_batch(run, num_gpus)):
        return None
    size = run.config.training.global_batch_size
    most = math.gcd(size, num_gpus)
    hints = []
    if (better := better_batch(size, num_gpus)) and has_valid(with_batch(run, better)):
        hints.append(f"use {better}")
    devices = num_gpus // found.num_nodes
    numbers = [n for n in ladder(most_nodes_of(run)) if math.gcd(size, n * devices) > most]
    if numbers:
        hints.append(f"try --nodes {min(numbers, key=lambda number: abs(number - found.num_nodes))}")
    reason = (
        f"suits no layout on {num_gpus:,} GPUs: the number of data-parallel replicas divides both, so it is at "
        f"most {most}, and each replica would need {num_gpus // most} GPUs or more"
    )
    return HpcgenError(located_in(run, Problem(GLOBAL_BATCH, reason, ", or ".join(hints))))
