"""Layout of a node's diagram: NUMA nodes from left to right, each with its GPUs and their NICs.

Both the SVG and the text diagram use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from hpcgen.config import cpus
from hpcgen.config.fabric import fabric_of
from hpcgen.config.node_type import Gpu, Nic, NodeType, PciLink
from hpcgen.topology.node import require

PCIE_GENERATIONS = {2.5: "1.0", 5.0: "2.0", 8.0: "3.0", 16.0: "4.0", 32.0: "5.0", 64.0: "6.0"}


@dataclass(frozen=True)
class Pair:
    """A GPU and its NICs. A NIC that several GPUs use is with the first of them."""

    index: int
    gpu: Gpu | None
    """The GPU; None for a NIC that no GPU uses."""
    nics: tuple[Nic, ...]
    cpus: str | None
    """CPUs of the rank that uses this GPU; None if there is no CPU mask for it."""

    @property
    def numa(self) -> int:
        """NUMA node in which the pair is drawn."""
        return (self.gpu or self.nics[0]).numa or 0

    @property
    def bridge(self) -> str | None:
        """PCI bridge above the pair."""
        return (self.gpu or self.nics[0]).bridge

    def on_other_numa(self, nic: Nic) -> str:
        """The NUMA node of a NIC, in words; empty if it is that of the pair or unknown."""
        return f" (NUMA {nic.numa})" if nic.numa not in (None, self.numa) else ""


@dataclass(frozen=True)
class Bridge:
    """Consecutive pairs below one PCI bridge, or directly below the CPU (`bus_id` None)."""

    bus_id: str | None
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class NumaBox:
    """One NUMA node."""

    number: int
    cpus: str
    bridges: tuple[Bridge, ...]

    @property
    def num_pairs(self) -> int:
        """Number of columns in the diagram."""
        return sum(len(bridge.pairs) for bridge in self.bridges)


def arrange(name: str, node_type: NodeType) -> tuple[NumaBox, ...]:
    """Arranges the NUMA nodes of a node type with their devices.

    Raises:
        HpcgenError: the node type lacks a fact that the diagram needs.
    """
    require(name, node_type, "the diagram", "gpus", "numa_nodes", "pci_link")
    pairs = list(_pairs(node_type))
    return tuple(
        NumaBox(number, numa.cpus, tuple(_bridges([pair for pair in pairs if pair.numa == number])))
        for number, numa in enumerate(node_type.numa_nodes)
    )


def _pairs(node_type: NodeType) -> Iterator[Pair]:
    masks = [cpus.ranges(int(mask, 16)) for mask in node_type.cpu_masks]
    left = list(node_type.nics)
    for index, (gpu, used) in enumerate(zip(node_type.gpus, nics_of_gpus(node_type), strict=True)):
        own = tuple(nic for nic in used if nic in left)
        left = [nic for nic in left if nic not in own]
        yield Pair(index, gpu, own, masks[index] if index < len(masks) else None)
    yield from (Pair(len(node_type.gpus) + index, None, (nic,), None) for index, nic in enumerate(left))


def nics_of_gpus(node_type: NodeType) -> tuple[tuple[Nic, ...], ...]:
    """The NICs that each GPU uses: those on its PCI bridge, otherwise those of its NUMA node, otherwise any.

    The GPUs share them evenly, in the order of the file: each GPU has one NIC or several, or several GPUs share one.
    """
    used: dict[Gpu, tuple[Nic, ...]] = {}
    gpus, nics = list(node_type.gpus), list(node_type.nics)
    for place in ("bridge", "numa"):
        of_gpus, of_nics = ({getattr(device, place) for device in devices} for devices in (gpus, nics))
        # with NUMA nodes that have only GPUs or only NICs, sharing by NUMA node would leave GPUs without a NIC
        together = of_gpus & of_nics if place == "bridge" or of_gpus == of_nics else set()
        for where in together - {None}:
            near = [gpu for gpu in gpus if getattr(gpu, place) == where]
            used |= _shared(near, [nic for nic in nics if getattr(nic, place) == where])
        gpus = [gpu for gpu in gpus if gpu not in used]
        nics = [nic for nic in nics if not any(nic in own for own in used.values())]
    used |= _shared(gpus, nics)
    return tuple(used[gpu] for gpu in node_type.gpus)


def _shared(gpus: Sequence[Gpu], nics: Sequence[Nic]) -> dict[Gpu, tuple[Nic, ...]]:
    """Divides NICs among GPUs, or GPUs among NICs if there are more GPUs."""
    if len(nics) < len(gpus):
        return {gpu: tuple(nics[index * len(nics) // len(gpus) :][:1]) for index, gpu in enumerate(gpus)}
    first = [index * len(nics) // len(gpus) for index in range(len(gpus) + 1)] if gpus else []
    return {gpu: tuple(nics[first[index] : first[index + 1]]) for index, gpu in enumerate(gpus)}


def _bridges(pairs: list[Pair]) -> Iterator[Bridge]:
    for bus_id, below in groupby(pairs, key=lambda pair: pair.bridge):
        yield Bridge(bus_id, tuple(below))


def pcie(link: PciLink) -> str:
    """Formats a link: "PCIe 5.0 x16", or with its speed if the generation is unknown."""
    generation = PCIE_GENERATIONS.get(link.speed_gt_s, f"{link.speed_gt_s:g} GT/s")
    return f"PCIe {generation} x{link.width}"


def pcie_gb_s(link: PciLink) -> float:
    """Bandwidth per direction (GB/s) after line coding: 8b/10b up to 5 GT/s, then 128b/130b."""
    efficiency = 8 / 10 if link.speed_gt_s <= 5 else 128 / 130
    return link.speed_gt_s * link.width * efficiency / 8


def nvlink_words(node_type: NodeType) -> str | None:
    """Describes the NVLink network in one line; None without NVLink."""
    nvlink = node_type.nvlink
    if nvlink is None:
        return None
    through = {None: "", 0: " GPU to GPU"}.get(nvlink.switches, f" through {nvlink.switches} NVSwitches")
    nodes = f", between {nvlink.domain_nodes} nodes" if nvlink.domain_nodes > 1 else ""
    return f"NVLink{through}: {nvlink.links} links, {nvlink.bandwidth_gb_s:g} GB/s per GPU{nodes}"


def fabric_words(node_type: NodeType) -> str | None:
    """Describes the network between nodes in one line; None without NICs."""
    if not node_type.nics:
        return None
    fabric = fabric_of(node_type)
    return f"{fabric.title if fabric else 'Network'} to other nodes: {rates(node_type.nics)}"


def rates(nics: Sequence[Nic]) -> str:
    """The line rates of NICs, the fastest first: "400 Gb/s", "4 x 100 Gb/s"."""
    counts = Counter(nic.rate_gbit_s for nic in nics)
    return ", ".join(
        f"{count} x {rate:g} Gb/s" if len(nics) > 1 else f"{rate:g} Gb/s"
        for rate, count in sorted(counts.items(), reverse=True)
    )
