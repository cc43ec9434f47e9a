"""Source-independent description of a node's topology, for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hpcgen.config import cpus
from hpcgen.config.node_type import Gpu, Nic, NodeType
from hpcgen.errors import HpcgenError

Kind = Literal["GPU", "NIC"]


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """One NUMA node. Attributes that the source does not state are None."""

    number: int
    cpus: int | None = None
    """CPU mask: bit i is CPU i."""
    arch: str | None = None
    vendor: str | None = None
    family: int | None = None
    model: int | None = None


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU or NIC. Attributes that the source does not state are None."""

    kind: Kind
    bus_id: str
    numa: int | None = None
    link_speed_gt_s: float | None = None
    link_width: int | None = None
    bridge_speed_gt_s: float | None = None
    """Link speed of the PCI bridge above the device. The device's traffic passes this link, too."""
    bridge_width: int | None = None
    gpus_on_bridge: tuple[str, ...] | None = None
    """NIC only: addresses of the GPUs on its PCI bridge. The bridges' own addresses are virtual and not compared."""
    name: str | None = None
    """NIC only: name of its RDMA device."""
    rate_gbit_s: float | None = None
    """NIC only: line rate (Gb/s)."""
    state: str | None = None
    """NIC only: port state, which should be "ACTIVE"."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """NUMA nodes sorted by number, and devices."""

    numa_nodes: tuple[NumaNode, ...]
    devices: tuple[Device, ...]

    def of_kind(self, kind: Kind) -> tuple[Device, ...]:
        """All GPUs or all NICs."""
        return tuple(device for device in self.devices if device.kind == kind)


def expected(name: str, node_type: NodeType) -> Topology:
    """Topology that a node of this type must have.

    Raises:
        HpcgenError: the node type lists no GPUs.
    """
    processor, link = node_type.processor, node_type.pci_link
    if not node_type.gpus or processor is None or link is None:
        raise HpcgenError(f"node type {name} lists no GPUs, so it has no topology to write or to compare")
    numa_nodes = [
        NumaNode(
            number=number,
            cpus=cpus.listed(numa.cpus),
            arch=processor.arch,
            vendor=processor.vendor,
            family=processor.family,
            model=processor.model,
        )
        for number, numa in enumerate(node_type.numa_nodes)
    ]

    def pci(device: Gpu | Nic) -> dict[str, Any]:
        own = {"link_speed_gt_s": link.speed_gt_s, "link_width": link.width}
        bridge = {"bridge_speed_gt_s": link.speed_gt_s, "bridge_width": link.width} if device.bridge else {}
        return {"bus_id": device.bus_id, "numa": device.numa, **own, **bridge}

    gpus = [Device(kind="GPU", **pci(gpu)) for gpu in node_type.gpus]
    nics = [
        Device(
            kind="NIC",
            **pci(nic),
            gpus_on_bridge=_gpus_below(node_type, nic.bridge),
            name=nic.name,
            rate_gbit_s=nic.rate_gbit_s,
            state="ACTIVE",
        )
        for nic in node_type.nics
    ]
    return Topology(numa_nodes=tuple(numa_nodes), devices=(*gpus, *nics))


def _gpus_below(node_type: NodeType, bridge: str | None) -> tuple[str, ...] | None:
    if bridge is None:
        return None
    return tuple(sorted(gpu.bus_id for gpu in node_type.gpus if gpu.bridge == bridge))
