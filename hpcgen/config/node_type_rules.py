"""Checks for contradictions between the facts of a node type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

from hpcgen.config import cpus
from hpcgen.config.node_type import FabricName, Gpu, Nic, NodeType
from hpcgen.errors import Problem
from hpcgen.text import counted, one_of

_OTHER_VENDORS = {
    "AMD": r"\b(AMD|INSTINCT|RADEON|MI\d{2,3}[A-Z]?)\b",
    "Intel": r"\b(INTEL|GAUDI\d?|HL \d\d+|PONTE VECCHIO|PVC|MAX 1\d{3})\b",
}
"""Vendor of GPUs that are not NVIDIA's -> words of their names, with blanks for - and _."""


def node_type_problems(node_type: NodeType) -> Iterator[Problem]:
    """Yields all contradictions. Missing facts contradict nothing."""
    yield from _other_vendor(node_type)
    yield from _counts(node_type)
    yield from _numa_nodes(node_type)
    yield from _cpu_counts(node_type)
    yield from _pci(node_type)
    yield from _masks(node_type)


def _other_vendor(node_type: NodeType) -> Iterator[Problem]:
    """Checks that the GPUs are NVIDIA's: jobs request CUDA and NCCL, and would fail on others only when they start."""
    vendor = _vendor_of(node_type.gpu_model or "")
    if vendor != "NVIDIA" and node_type.gpus_per_node:
        reason = f"is a GPU of {vendor}, but hpcgen's jobs need CUDA, NCCL and NVIDIA's GPUs"
        yield Problem("gpu_model", reason, "describe nodes with NVIDIA's GPUs, or with device: cpu")


def _vendor_of(gpu_model: str) -> str:
    """The vendor of a GPU by its name: AMD for "MI250X". A name without another vendor counts as NVIDIA's."""
    words = re.sub(r"[-_]", " ", gpu_model)
    found = (name for name, names in _OTHER_VENDORS.items() if re.search(names, words, re.IGNORECASE))
    return next(found, "NVIDIA")


def _counts(node_type: NodeType) -> Iterator[Problem]:
    for key, count in (("gpus", len(node_type.gpus)), ("cpu_masks", len(node_type.cpu_masks))):
        if count and count != node_type.gpus_per_node:
            reason = (
                f"has {counted(count, 'entry', 'entries')}, but gpus_per_node is {node_type.gpus_per_node}"
            )
            yield Problem(key, reason, "use one entry per GPU, or none", about=("gpus_per_node",))
    if node_type.nics and node_type.fabric is None:
        yield Problem(
            "fabric",
            "is missing, but there are nics",
            f"set it to {one_of(get_args(FabricName))}",
            about=("nics",),
        )


def _numa_nodes(node_type: NodeType) -> Iterator[Problem]:
    taken = 0
    for index, numa in enumerate(node_type.numa_nodes):
        mask = cpus.listed(numa.cpus)
        if not mask:
            yield Problem(f"numa_nodes[{index}].cpus", "contains no CPU", 'use "FIRST-LAST"')
        if shared := mask & taken:
            reason = f"shares {cpus.named(shared)} with another NUMA node"
            yield Problem(f"numa_nodes[{index}].cpus", reason)
        taken |= mask


def _cpu_counts(node_type: NodeType) -> Iterator[Problem]:
    """Checks cpus_per_node against lists of CPUs. Slurm may count cores, which are fewer than the NUMA nodes' CPUs."""
    total = node_type.cpus_per_node
    if total is None:
        return
    named = 0
    for numa in node_type.numa_nodes:
        named |= cpus.listed(numa.cpus)
    if named and total > named.bit_count():
        reason = f"is more than the {named.bit_count()} CPUs of numa_nodes ({cpus.ranges(named)})"
        yield Problem("cpus_per_node", reason, "correct one of them", about=("numa_nodes",))
    share = total // len(node_type.cpu_masks) if node_type.cpu_masks else 0
    for index, text in enumerate(node_type.cpu_masks):
        if 0 < (size := int(text, 16).bit_count()) < share:
            reason = (
                f"contains {counted(size, 'CPU')}, but a rank's share of cpus_per_node = {total} is {share}"
            )
            hint = "use masks that cover all CPUs, or set cpu_masks to [] to leave the binding to Slurm"
            yield Problem(f"cpu_masks[{index}]", reason, hint, about=("cpus_per_node",))
            return  # the other masks usually have the same size


def _pci(node_type: NodeType) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    numa_of_bridge: dict[str, int] = {}
    devices: list[tuple[str, Gpu | Nic]] = [
        *((f"gpus[{index}]", gpu) for index, gpu in enumerate(node_type.gpus)),
        *((f"nics[{index}]", nic) for index, nic in enumerate(node_type.nics)),
    ]
    for path, device in devices:
        if device.bus_id in seen:
            yield Problem(f"{path}.bus_id", f"is also the address of {seen[device.bus_id]}")
        if device.bus_id is not None:
            seen.setdefault(device.bus_id, path)
        if device.numa is None:
            continue
        if node_type.numa_nodes and device.numa >= len(node_type.numa_nodes):
            nodes = counted(len(node_type.numa_nodes), "entry", "entries")
            yield Problem(
                f"{path}.numa",
                f"is not a NUMA node: numa_nodes has {nodes}, counted from 0",
                about=("numa_nodes",),
            )
        if device.bridge and numa_of_bridge.setdefault(device.bridge, device.numa) != device.numa:
            other = numa_of_bridge[device.bridge]
            reason = f"is on NUMA node {other} for other devices, but {path}.numa is {device.numa}"
            yield Problem(f"{path}.bridge", reason)
    order = [gpu.bus_id for gpu in node_type.gpus]
    if order != sorted(order):
        yield Problem(
            "gpus", "are not in the order of their PCI addresses, which local ranks follow", "sort them"
        )
    names = [nic.name for nic in node_type.nics]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(f"nics[{index}].name", "is also the name of another NIC")


def _masks(node_type: NodeType) -> Iterator[Problem]:
    taken = 0
    for index, text in enumerate(node_type.cpu_masks):
        mask = int(text, 16)
        if not mask:
            yield Problem(f"cpu_masks[{index}]", "contains no CPU")
        if shared := mask & taken:
            yield Problem(f"cpu_masks[{index}]", f"shares {cpus.named(shared)} with another rank")
        taken |= mask
        if outside := mask & ~_cpus_near_gpu(node_type, index):
            reason = f"contains {cpus.named(outside)} outside the NUMA node of GPU {index}"
            yield Problem(f"cpu_masks[{index}]", reason)


def _cpus_near_gpu(node_type: NodeType, index: int) -> int:
    """The CPUs of the GPU's NUMA node; all CPUs if the NUMA node is unknown."""
    if index < len(node_type.gpus) and node_type.gpus[index].numa < len(node_type.numa_nodes):
        return cpus.listed(node_type.numa_nodes[node_type.gpus[index].numa].cpus)
    return -1
