"""Comparison of a node type's topology with the topology of a live node or a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hpcgen.config import cpus
from hpcgen.topology.node import Device, Kind, Topology, Unlisted

PRESENCE, PRESENT, ABSENT = "presence", "present", "absent"
"""Attribute and its two values for a device that only one side has."""


@dataclass(frozen=True)
class Difference:
    """One deviation from the expected topology."""

    device: str
    """Name of the device: "NUMA node 0", "GPU 3 (0008:00:00.0)", "NIC mlx5_ib3 (0104:00:00.0)"."""
    attribute: str
    """Name of the attribute."""
    expected: str
    found: str

    def __str__(self) -> str:
        if self.attribute == PRESENCE:
            return f"{self.device}: {'missing' if self.found == ABSENT else 'not expected'}"
        return f"{self.device}: {self.attribute}: expected {self.expected}, found {self.found}"


def differences(expected: Topology, found: Topology) -> tuple[Difference, ...]:
    """All differences, NUMA nodes first. An attribute that is unknown on one side is not compared."""
    return (
        *_numa_differences(expected, found),
        *_device_differences("GPU", expected, found),
        *_device_differences("NIC", expected, found),
    )


def _numa_differences(expected: Topology, found: Topology) -> Iterator[Difference]:
    if not expected.numa_nodes:
        masks = [numa.cpus for numa in found.numa_nodes if numa.cpus is not None]
        number = sum(mask.bit_count() for mask in masks)
        if expected.num_cpus is not None and number and number != expected.num_cpus:
            yield Difference("CPUs", "number", str(expected.num_cpus), str(number))
        return
    there = {numa.number: numa for numa in found.numa_nodes}
    for numa in expected.numa_nodes:
        name = f"NUMA node {numa.number}"
        if numa.number in there:
            yield from _compare(name, NUMA_ATTRIBUTES, numa, there.pop(numa.number))
        else:
            yield Difference(name, PRESENCE, PRESENT, ABSENT)
    for number, numa in sorted(there.items()):
        if numa.cpus != 0:  # accelerators may have NUMA nodes without CPUs, to which nothing is bound
            yield Difference(f"NUMA node {number}", PRESENCE, ABSENT, PRESENT)


def _device_differences(kind: Kind, expected: Topology, found: Topology) -> Iterator[Difference]:
    there = list(found.of_kind(kind))
    of_kind = [each for each in expected.unlisted if each.common.kind == kind]
    if of_kind or not expected.of_kind(kind):
        for unlisted in of_kind:
            yield from _unlisted_differences(unlisted, there)
        return
    for index, device in enumerate(expected.of_kind(kind)):
        address = f" ({device.bus_id})" if device.bus_id else ""
        name = f"{kind} {device.name or index}{address}"
        same = next((other for other in there if _is_same(device, other)), None)
        if same:
            there.remove(same)
            yield from _compare(name, DEVICE_ATTRIBUTES, device, same)
        else:
            yield Difference(name, PRESENCE, PRESENT, ABSENT)
    for other in sorted(there, key=lambda device: device.bus_id or ""):
        yield Difference(f"{kind} {other.bus_id}", PRESENCE, ABSENT, PRESENT)


def _unlisted_differences(expected: Unlisted, found: Sequence[Device]) -> Iterator[Difference]:
    kind = expected.common.kind
    # further NICs can be those of the management network
    if len(found) < expected.number or (kind == "GPU" and len(found) > expected.number):
        yield Difference(f"{kind}s", "number", str(expected.number), str(len(found)))
    for device in found:
        yield from _compare(f"{kind} {device.bus_id}", DEVICE_ATTRIBUTES, expected.common, device)


def _is_same(expected: Device, found: Device) -> bool:
    """Compares addresses, or names if the node type gives no address."""
    if expected.bus_id is None:
        return expected.name == found.name
    return expected.bus_id == found.bus_id


def _compare(
    name: str, attributes: dict[str, tuple[str, Callable[..., str]]], expected: object, found: object
) -> Iterator[Difference]:
    for key, (words, show) in attributes.items():
        wanted, actual = getattr(expected, key), getattr(found, key)
        if wanted is not None and actual is not None and wanted != actual:
            yield Difference(name, words, show(wanted), show(actual))


def _cpu_list(mask: int) -> str:
    return cpus.ranges(mask) or "none"


def _gpus(bus_ids: tuple[str, ...]) -> str:
    return " and ".join(bus_ids) or "none"


NUMA_ATTRIBUTES: dict[str, tuple[str, Callable[..., str]]] = {
    "cpus": ("CPUs", _cpu_list),
    "arch": ("architecture", str),
    "vendor": ("vendor", str),
    "family": ("family", str),
    "model": ("model", str),
}
DEVICE_ATTRIBUTES: dict[str, tuple[str, Callable[..., str]]] = {
    "numa": ("NUMA node", str),
    "gpus_on_bridge": ("GPUs on its bridge", _gpus),
    "link_speed_gt_s": ("PCIe speed", "{:g} GT/s".format),
    "link_width": ("PCIe width", "x{}".format),
    "bridge_speed_gt_s": ("PCIe speed of its bridge", "{:g} GT/s".format),
    "bridge_width": ("PCIe width of its bridge", "x{}".format),
    "name": ("RDMA device", str),
    "rate_gbit_s": ("rate", "{:g} Gb/s".format),
    "state": ("port", str),
}
"""Maps attributes to their displayed name and the formatter of their value."""
