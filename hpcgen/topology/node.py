"""Source-independent description of a node's topology, for comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from hpcgen.config import cpus
from hpcgen.config.node_type import Gpu, Nic, NodeType
from hpcgen.errors import HpcgenError
from hpcgen.text import few

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
    bus_id: str | None
    """PCI address. None for a NIC of a node type that only gives its name."""
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
class Unlisted:
    """Devices of a kind that a node type does not list, or that the other side cannot tell apart."""

    number: int
    common: Device
    """Attributes that all of them have."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """NUMA nodes sorted by number, and devices."""

    numa_nodes: tuple[NumaNode, ...]
    devices: tuple[Device, ...]
    unlisted: tuple[Unlisted, ...] = ()
    """Kinds without devices in the list, of a node type."""
    num_cpus: int | None = None
    """Number of CPUs, of a node type without NUMA nodes."""

    def of_kind(self, kind: Kind) -> tuple[Device, ...]:
        """All GPUs or all NICs."""
        return tuple(device for device in self.devices if device.kind == kind)


def require(name: str, node_type: NodeType, purpose: str, *keys: str) -> None:
    """Checks that a node type states the facts at `keys`, which are optional in its file.

    Raises:
        HpcgenError: facts are missing. Lists all of them.
    """
    if missing := [key for key in keys if not getattr(node_type, key)]:
        lack(name, purpose, missing)


def lack(name: str, purpose: str, missing: Sequence[str]) -> NoReturn:
    """Raises HpcgenError for the facts that `purpose` needs and node type `name` does not state."""
    raise HpcgenError(
        f"node type {name} does not state {', '.join(missing)}, which {purpose} needs",
        f"add {'it' if len(missing) == 1 else 'them'} to its file (see topologies/README.md)",
    )


def nics_without(node_type: NodeType, key: str) -> list[str]:
    """The key and the NICs that do not state it, as an entry for `lack`; empty if all do."""
    names = [nic.name for nic in node_type.nics if getattr(nic, key) is None]
    return [f"nics[].{key} ({few(names)})"] if names else []


def expected(name: str, node_type: NodeType, *, nics_have_names: bool = True) -> Topology:
    """Topology that a node of this type must have. Facts that it does not state are None; see `unstated`.

    `nics_have_names` is False for a comparison with a topology file, which does not name NICs.

    Raises:
        HpcgenError: the node type states nothing that could differ.
    """
    processor, link = node_type.processor, node_type.pci_link
    cpu: dict[str, Any] = dataclasses.asdict(processor) if processor else {}
    if processor and processor.is_arm:
        cpu["arch"] = "arm64"  # as NCCL calls it
    numa_nodes = [
        NumaNode(number=number, cpus=cpus.listed(numa.cpus), **cpu)
        for number, numa in enumerate(node_type.numa_nodes)
    ]

    def pci(device: Gpu | Nic) -> dict[str, Any]:
        place = {"bus_id": device.bus_id, "numa": device.numa}
        if link is None:
            return place
        own = {"link_speed_gt_s": link.speed_gt_s, "link_width": link.width}
        bridge = {"bridge_speed_gt_s": link.speed_gt_s, "bridge_width": link.width} if device.bridge else {}
        return {**place, **own, **bridge}

    lists_nics = nics_have_names or not nics_without(node_type, "bus_id")
    number = node_type.nics_per_node or len(node_type.nics) or None
    common: dict[str, Any] = (
        {"link_speed_gt_s": link.speed_gt_s, "link_width": link.width} if link is not None else {}
    )
    kinds: tuple[tuple[Kind, int | None, bool], ...] = (
        ("GPU", node_type.gpus_per_node, bool(node_type.gpus)),
        ("NIC", number, bool(node_type.nics) and lists_nics),
    )
    unlisted = [
        Unlisted(number=number, common=Device(kind=kind, bus_id=None, **common))
        for kind, number, is_listed in kinds
        if not is_listed and number is not None
    ]
    if not (node_type.gpus_per_node or number or numa_nodes or node_type.cpus_per_node):
        lack(name, "a comparison", ["gpus", "nics", "cpus_per_node"])
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
        if lists_nics
    ]
    return Topology(
        numa_nodes=tuple(numa_nodes),
        devices=(*gpus, *nics),
        unlisted=tuple(unlisted),
        num_cpus=None if numa_nodes else node_type.cpus_per_node,
    )


def unstated(node_type: NodeType, *, nics_have_names: bool = True) -> list[str]:
    """Keys of a node type whose facts a comparison lacks, so that it says nothing about them."""
    keys = [key for key in ("gpus", "numa_nodes", "pci_link") if not getattr(node_type, key)]
    if not node_type.nics:
        return [*keys, *([] if node_type.nics_per_node else ["nics_per_node"]), "nics"]
    return keys + ([] if nics_have_names else nics_without(node_type, "bus_id"))


def _gpus_below(node_type: NodeType, bridge: str | None) -> tuple[str, ...] | None:
    if bridge is None:
        return None
    return tuple(sorted(gpu.bus_id for gpu in node_type.gpus if gpu.bridge == bridge))
