"""Nodes and GPUs of a layout's ranks, and the bytes that its parallel axes send over NVLink and the network."""

from __future__ import annotations

from dataclasses import dataclass

from hpcgen.planning.layouts.result import RankedLayout
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time import Machine, transfers
from hpcgen.planning.step_time.traffic import Transfer
from hpcgen.text import counted, size_text
from trainer.contract.model.layout import Layout

MOST_COMPLETE = 8
"""Nodes up to which all are shown. Of larger jobs, those of one replica are shown."""
MOST_NODES = 32
"""Nodes to show at most."""
AXES = {
    "tensor": "tensor parallel",
    "context": "context parallel",
    "expert": "expert parallel",
    "expert_tensor": "expert tensor parallel",
    "pipeline": "pipeline",
    "data": "data parallel",
    "expert_data": "expert data parallel",
}
"""Names of the parallel axes, in the order of the page."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU with its rank."""

    stage: int
    text: str
    title: str
    is_first: bool
    """True if it belongs to the first replica."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node. GPUs that share a part of a replica are together."""

    number: int
    stages: str
    """The pipeline stages on it."""
    parts: tuple[tuple[Gpu, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that an axis sends in a step, from one GPU. Widths are in percent of the axis that sends most."""

    name: str
    ranks: str
    """How many ranks there are, and how many of them are close to each other."""
    sent: str
    where: str
    """Over NVLink or PCIe, over the network, or both."""
    inside_width: float
    network_width: float


@dataclass(frozen=True, kw_only=True)
class DevicesPicture:
    """The nodes of a layout and its transfers."""

    nodes: tuple[Node, ...]
    note: str
    link: str
    """NVLink or PCIe."""
    traffic: tuple[Traffic, ...]
    in_network: str
    """Bytes that a GPU sends over the network in a step."""


def devices_picture(layout: RankedLayout, machine: Machine, *, has_nvlink: bool) -> DevicesPicture:
    """The picture of a layout on its machine, whose GPUs NVLink or PCIe connects in a node."""
    per_node, axes = layout.facts.gpus_per_node, layout.layout
    numbers = _shown_nodes(axes, per_node)
    found = transfers(Setup.of_facts(layout.facts, axes), machine)
    most, link = max((each.sent for each in found), default=1.0), "NVLink" if has_nvlink else "PCIe"
    return DevicesPicture(
        nodes=tuple(_node(axes, number, per_node) for number in numbers[:MOST_NODES]),
        note=_note(axes, numbers, per_node),
        link=link,
        traffic=tuple(
            _traffic(each, most, link) for each in sorted(found, key=lambda each: list(AXES).index(each.axis))
        ),
        in_network=size_text(sum(each.in_network for each in found)),
    )


def _replica_size(layout: Layout) -> int:
    """Number of consecutive ranks of a stage that together hold all its weights once."""
    experts = layout.expert_tensor_parallel_size * layout.expert_model_parallel_size
    dense = layout.tensor_model_parallel_size * layout.context_parallel_size
    return dense if layout.expert_data_parallel_size is None else max(dense, experts)


def _stage_ranks(layout: Layout) -> int:
    return layout.world_size // layout.pipeline_model_parallel_size


def _shown_nodes(layout: Layout, per_node: int) -> list[int]:
    """All nodes, or those with GPUs of the first replica."""
    if layout.world_size <= MOST_COMPLETE * per_node:
        return list(range(-(-layout.world_size // per_node)))
    stage_ranks, size = _stage_ranks(layout), _replica_size(layout)
    starts = range(0, layout.world_size, stage_ranks)
    return sorted({rank // per_node for start in starts for rank in range(start, start + size)})


def _node(layout: Layout, number: int, per_node: int) -> Node:
    size, stage_ranks = _replica_size(layout), _stage_ranks(layout)
    parts: list[list[Gpu]] = []
    previous = None
    for rank in range(number * per_node, min((number + 1) * per_node, layout.world_size)):
        part = rank // stage_ranks, rank % stage_ranks // size
        if part != previous:
            parts.append([])
        parts[-1].append(_gpu(layout, rank))
        previous = part
    stages = sorted({part[0].stage for part in parts})
    return Node(
        number=number,
        stages=f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]} to {stages[-1]}",
        parts=tuple(map(tuple, parts)),
    )


def _gpu(layout: Layout, rank: int) -> Gpu:
    """The order of ranks is that of `Groups`."""
    stage, left = divmod(rank, _stage_ranks(layout))
    tensor, context = layout.tensor_model_parallel_size, layout.context_parallel_size
    places = {
        "tensor rank": (left % tensor, tensor),
        "context rank": (left // tensor % context, context),
        "data rank": (left // (tensor * context), layout.data_parallel_size),
        "expert rank": (
            left // layout.expert_tensor_parallel_size % layout.expert_model_parallel_size,
            layout.expert_model_parallel_size,
        ),
    }
    words = [f"{name} {at}" for name, (at, size) in places.items() if size > 1]
    return Gpu(
        stage=stage,
        text=str(left % _replica_size(layout)) if _replica_size(layout) > 1 else "",
        title=f"rank {rank}: {', '.join([f'stage {stage}', *words])}",
        is_first=left < _replica_size(layout),
    )


def _note(layout: Layout, numbers: list[int], per_node: int) -> str:
    replicas = _stage_ranks(layout) // _replica_size(layout)
    num_nodes = -(-layout.world_size // per_node)
    parts = [f"{counted(replicas, 'replica')} of the model on {counted(num_nodes, 'node')}"]
    if len(numbers) < num_nodes:
        parts.append("shown are the nodes of the first one; the others are placed alike")
    if len(numbers) > MOST_NODES:
        parts.append(f"only the first {MOST_NODES} of its {len(numbers):,} nodes are shown")
    return "; ".join(parts)


def _traffic(transfer: Transfer, most: float, link: str) -> Traffic:
    group, domain = transfer.group, "NVLink domain" if link == "NVLink" else "node"
    return Traffic(
        name=AXES[transfer.axis],
        ranks=f"{group.size:,} ranks, {group.per_domain} per {domain}",
        sent=size_text(transfer.sent),
        where=_where(transfer, link),
        inside_width=100 * (transfer.sent - transfer.in_network) / most,
        network_width=100 * transfer.in_network / most,
    )


def _where(transfer: Transfer, link: str) -> str:
    if not transfer.in_network:
        return f"over {link}"
    if transfer.in_network >= transfer.sent:
        return "over the network"
    return f"{size_text(transfer.in_network)} of it over the network"
