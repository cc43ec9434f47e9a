"""Choice of the measurements on a cluster, so that the predictions of some trainings need fewer guesses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hpcgen.config.node_type import NodeType
from hpcgen.config.node_types import load_node_type
from hpcgen.planning.launch_trainings import launch_trainings
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time.collectives import Collective, Group
from hpcgen.planning.step_time.estimate import estimate_step_time, workload
from hpcgen.planning.step_time.host import host_rows
from hpcgen.planning.step_time.kernels import Attention, Kernels, MemoryBound, Product
from hpcgen.planning.step_time.machine import Machine, missing_facts
from hpcgen.planning.step_time.measurements import Measurements
from trainer.contract.calibration import BUDGET_S, MOVED_BYTES, CalibrationConfig, Job, moved_bytes
from trainer.contract.config import TrainerConfig
from trainer.contract.model.layout import Layout

MIB = 2**20
TRANSFERRED = tuple(MIB * size // 4 for size in (1, 4, 16, 64, 256, 1024, 4096))
"""Sizes of measured transfers in bytes."""
TRANSFERRED_BY_CPUS = (MIB // 4,)
BESIDE = tuple(MIB * size for size in (64, 256, 1024))
"""Sizes of transfers next to products."""
LARGEST_MOVED = 2**33
"""Kernels that move more bytes are like those that move this many."""
SMALLEST_MOVED = 128
"""Rows of a tensor below which its kernels are only launches."""
ROTATED = 128
"""Width of the heads that are rotated."""
POWER_S = 20.0
LIKE = "h100-sxm"
"""Node type that tells which kernels and transfers a training needs where the facts of the nodes are unknown."""


def calibration_config(
    trainers: Sequence[TrainerConfig],
    node_type: NodeType,
    ranks_per_node: int,
    nvlink_nodes: int,
    measured: Measurements | None = None,
    budget_s: float = BUDGET_S,
) -> CalibrationConfig | None:
    """Measurements for these resolved trainings, which run on the same nodes. None if everything is measured.

    `measured` is what was measured on the cluster before.
    """
    device, world_size = node_type.device, trainers[0].world_size
    domain_size = min(ranks_per_node * nvlink_nodes, world_size)
    machine = _machine(node_type, domain_size, ranks_per_node, measured)
    setups = [_setup(trainer) for trainer in trainers]
    kernels, transfers = None, set[tuple[Collective, Group]]()
    for setup in setups:
        kernels, noted = workload(setup, machine)
        transfers |= noted
    assert kernels is not None
    jobs = [*_transfers(transfers, machine, device), *_kernels(kernels, setups, device)]
    if device == "cuda":
        jobs += [*_host(trainers, setups, machine), *_beside(machine), *_power(machine)]
    if not jobs:
        return None
    return CalibrationConfig(device=device, domain_size=domain_size, jobs=tuple(jobs), budget_s=budget_s)


def _machine(
    node_type: NodeType, domain_size: int, ranks_per_node: int, measured: Measurements | None
) -> Machine:
    """The machine of the nodes, of which no estimate has used the kernels yet."""
    if missing_facts(node_type, "bf16"):
        unknown = Machine.of(load_node_type(LIKE), domain_size, ranks_per_node)
        return dataclasses.replace(unknown, measurements=measured, cluster=measured)
    return Machine.of(node_type, domain_size, ranks_per_node, measured)


def _setup(trainer: TrainerConfig) -> Setup:
    layout = Layout.make(trainer.model, trainer.parallelism, trainer.training, trainer.world_size)
    assert layout is not None  # the rules have accepted the training
    return Setup.of(trainer, layout)


def _host(trainers: Sequence[TrainerConfig], setups: Sequence[Setup], machine: Machine) -> Iterator[Job]:
    """Yields the launches of each kind of layer that the cluster has not measured, first those that GPUs wait for."""
    seen = []
    pairs = [
        (trainer, setup, estimate_step_time(setup, machine))
        for trainer, setup in zip(trainers, setups, strict=True)
    ]
    for trainer, setup, _ in sorted(pairs, key=lambda pair: -pair[2].host / pair[2].total):
        for row, has_experts in host_rows(setup, machine):
            if row not in seen:
                seen.append(row)
                yield Job(
                    section="host",
                    row=row,
                    trainings=launch_trainings(trainer, setup, has_experts=has_experts),
                )


def _host_share(setup: Setup, machine: Machine) -> float:
    """Part of a step that GPUs wait for the host."""
    step = estimate_step_time(setup, machine)
    return step.host / step.total


def _transfers(needed: Iterable[tuple[Collective, Group]], machine: Machine, device: str) -> Iterator[Job]:
    """Yields the transfers among groups that were not measured, those between domains first."""
    table = machine.measurements.collectives if machine.measurements else ()
    known = {(row["collective"], row["ranks"], row.get("domains", 1)) for row in table}
    ordered = sorted(needed, key=lambda each: (-each[1].num_domains, each[1].size, each[0]))
    for collective, group in ordered:
        ranks, domains = group.num_domains * group.per_domain, group.num_domains
        if ranks != group.size or ranks == 1 or (collective, ranks, domains) in known:
            continue
        shape = {"collective": collective, "ranks": ranks} | ({"domains": domains} if domains > 1 else {})
        for size in TRANSFERRED if device == "cuda" else TRANSFERRED_BY_CPUS:
            yield Job(section="collectives", row={**shape, "bytes": size})


def _beside(machine: Machine) -> Iterator[Job]:
    """Yields transfers of a domain next to products, if there are no such rows of the GPU model."""
    table, ranks = machine.measurements, machine.nvlink_devices
    if ranks > 1 and not (table and table.beside):
        for collective in ("all_gather", "reduce_scatter"):
            for size in BESIDE:
                yield Job(section="beside", row={"collective": collective, "ranks": ranks, "bytes": size})


def _power(machine: Machine) -> Iterator[Job]:
    table = machine.measurements
    if not (table and table.power):
        yield Job(section="power", row={"load": "bf16_products", "seconds": POWER_S})


def _kernels(kernels: Kernels, setups: Sequence[Setup], device: str) -> Iterator[Job]:
    """Yields the kernels that were used and can be measured, but are not, the longest first."""
    topk = max((setup.model.moe_router_topk for setup in setups), default=1)
    for used in kernels.used:
        shape = used
        if isinstance(used, MemoryBound):
            shape = used._replace(size=min(used.size, LARGEST_MOVED))
        if kernels.is_measured(shape):
            continue
        if isinstance(shape, Product):
            if shape.precision == "bf16" or (shape.precision == "fp8" and device == "cuda"):
                yield Job(section="products", row=_product(shape))
        elif isinstance(shape, Attention):
            yield Job(section="attention", row=_attention(shape))
        elif device == "cuda" and (row := _moved(shape, topk)):
            yield Job(section="memory", row=row)


def _product(shape: Product) -> dict[str, Any]:
    return {
        "pass": shape.kind,
        "precision": shape.precision,
        "m": _count(shape.m) * shape.groups,
        "n": _count(shape.n),
        "k": _count(shape.k),
        "groups": shape.groups,
    }


def _attention(shape: Attention) -> dict[str, Any]:
    sizes = {name: _count(getattr(shape, name)) for name in ("seq", "batch", "heads", "kv_heads")}
    return {"pass": shape.direction, **sizes, "qk_dim": shape.qk_dim, "v_dim": shape.v_dim}


def _moved(shape: MemoryBound, topk: int) -> dict[str, Any] | None:
    """The row of a kernel that moves bytes; None if it is too small, or if no such kernel is measured alone."""
    if shape.kernel not in MOVED_BYTES or shape.kernel == "embedding":
        return None
    width = _count(shape.width)
    row: dict[str, Any] = {"kernel": shape.kernel, "pass": shape.direction}
    if shape.experts > 1:
        row = {**row, "experts": _count(shape.experts), "topk": topk}
    forward, backward = moved_bytes({**row, "topk": topk})
    per_token = width * (forward if shape.direction == "forward" else backward)
    tokens = int(shape.size / per_token) if per_token else 0
    if tokens < SMALLEST_MOVED or (shape.kernel == "rope" and width % ROTATED):
        return None
    return {**row, "tokens": tokens, "width": width}


def _count(number: float) -> int:
    return max(1, round(number))
