"""Layout of a node's diagram: NUMA nodes from left to right, each with its GPUs and their NICs.

Both the SVG and the text diagram use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, zip_longest

from hpcgen.config import cpus
from hpcgen.config.node_type import Gpu, Nic, NodeType, PciLink
from hpcgen.errors import HpcgenError

PCIE_GENERATIONS = {2.5: "1.0", 5.0: "2.0", 8.0: "3.0", 16.0: "4.0", 32.0: "5.0", 64.0: "6.0"}


@dataclass(frozen=True)
class Pair:
    """A GPU and the NIC it uses."""

    index: int
    gpu: Gpu | None
    nic: Nic | None
    cpus: str | None
    """CPUs of the rank that uses this GPU; None if there is no CPU mask for it."""

    @property
    def numa(self) -> int:
        """NUMA node in which the pair is drawn."""
        return (self.gpu or self._nic).numa

    @property
    def bridge(self) -> str | None:
        """PCI bridge above the pair."""
        return (self.gpu or self._nic).bridge

    @property
    def _nic(self) -> Nic:
        assert self.nic is not None
        return self.nic


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
        HpcgenError: the node type lists no GPUs.
    """
    if not node_type.gpus or node_type.pci_link is None:
        raise HpcgenError(f"node type {name} lists no GPUs, so there is nothing to draw")
    pairs = list(_pairs(node_type))
    return tuple(
        NumaBox(number, numa.cpus, tuple(_bridges([pair for pair in pairs if pair.numa == number])))
        for number, numa in enumerate(node_type.numa_nodes)
    )


def _pairs(node_type: NodeType) -> Iterator[Pair]:
    masks = [cpus.ranges(int(mask, 16)) for mask in node_type.cpu_masks]
    for index, (gpu, nic) in enumerate(zip_longest(node_type.gpus, node_type.nics)):
        yield Pair(index, gpu, nic, masks[index] if index < len(masks) else None)


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
    switches = f"through {nvlink.switches} NVSwitches" if nvlink.switches else "GPU to GPU"
    return f"NVLink {switches}: {nvlink.links} links, {nvlink.bandwidth_gb_s:g} GB/s per GPU"


def fabric_words(node_type: NodeType) -> str | None:
    """Describes the network between nodes in one line; None without NICs."""
    if not node_type.nics:
        return None
    rates = sorted({nic.rate_gbit_s for nic in node_type.nics}, reverse=True)
    counts = ", ".join(
        f"{sum(nic.rate_gbit_s == rate for nic in node_type.nics)} x {rate:g} Gb/s" for rate in rates
    )
    names = {"infiniband": "InfiniBand", "roce": "Ethernet (RoCE)", "ethernet": "Ethernet"}
    return f"{names.get(node_type.fabric or '', 'Network')} to other nodes: {counts}"
