"""The topology of one node in the terms that can be compared, wherever it was read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hpcgen.config import cpus
from hpcgen.config.node_type import Gpu, Nic, NodeType
from hpcgen.errors import HpcgenError

Kind = Literal["GPU", "NIC"]


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """One NUMA node; null is what the source does not say."""

    number: int
    cpus: int | None = None
    """As a mask: bit i is CPU i."""
    arch: str | None = None
    vendor: str | None = None
    family: int | None = None
    model: int | None = None


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU or NIC; null is what the source does not say."""

    kind: Kind
    bus_id: str
    numa: int | None = None
    link_speed_gt_s: float | None = None
    link_width: int | None = None
    bridge_speed_gt_s: float | None = None
    """Of the PCI bridge above it, which its traffic passes as well."""
    bridge_width: int | None = None
    gpus_beside: tuple[str, ...] | None = None
    """Of a NIC: the GPUs on its PCI bridge, by address. The bridges' own addresses are made up, so they don't count."""
    name: str | None = None
    """Of a NIC: its RDMA device."""
    rate_gbit_s: float | None = None
    """Of a NIC: its line rate (Gb/s)."""
    state: str | None = None
    """Of a NIC: the state of its port; "ACTIVE" is the good one."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """NUMA nodes by number, devices by address."""

    numa_nodes: tuple[NumaNode, ...]
    devices: tuple[Device, ...]

    def of_kind(self, kind: Kind) -> tuple[Device, ...]:
        """The GPUs, or the NICs."""
        return tuple(device for device in self.devices if device.kind == kind)


def expected(name: str, node_type: NodeType) -> Topology:
    """What a node of that type has.

    Raises:
        HpcgenError: the node type says nothing of GPUs.
    """
    processor, link = node_type.processor, node_type.pci_link
    if not node_type.gpus or processor is None or link is None:
        raise HpcgenError(f"node type {name} lists no GPUs", "there is no topology to write or to compare")
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
            gpus_beside=_gpus_below(node_type, nic.bridge),
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
