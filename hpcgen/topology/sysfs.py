"""Reads the topology of a live node from the kernel's sysfs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hpcgen.config import cpus
from hpcgen.config.fabric import load_fabric
from hpcgen.errors import HpcgenError
from hpcgen.topology.nccl_xml import link_speed
from hpcgen.topology.node import Device, NumaNode, Topology

NVIDIA = "0x10de"
"""PCI vendor ID. Virtual machines also have a display device of the hypervisor."""
GPU_CLASSES = ("0x0300", "0x0302")


def read(directory: Path, fabric: str) -> Topology:
    """Reads the topology from `directory`, which is a node's /sys or a copy of it. `fabric` selects the kind of NICs.

    A virtual machine has no bridges in sysfs, so the assignment of NICs to GPUs remains unknown.

    Raises:
        HpcgenError: the directory is neither /sys nor a copy of it.
    """
    pci = directory / "bus/pci/devices"
    if not pci.is_dir():
        raise HpcgenError("no such directory", "give the /sys of a Linux node, or a copy of it", where=pci)
    devices = [_device(path, fabric) for path in sorted(pci.iterdir(), key=lambda path: path.name)]
    nodes = [
        NumaNode(number=int(path.name.removeprefix("node")), cpus=_cpus(path / "cpulist"))
        for path in (directory / "devices/system/node").glob("node[0-9]*")
    ]
    return Topology(
        numa_nodes=tuple(sorted(nodes, key=lambda numa: numa.number)),
        devices=tuple(device for device in devices if device is not None),
    )


def _device(path: Path, fabric: str) -> Device | None:
    pci_class = _text(path / "class") or ""
    numa = _text(path / "numa_node") or "-1"
    known: dict[str, Any] = {
        "bus_id": path.name.lower(),
        "numa": int(numa) if numa.isdecimal() else None,  # -1: not stated by the hypervisor
        "link_speed_gt_s": link_speed(_text(path / "current_link_speed") or ""),
        "link_width": _positive(_text(path / "current_link_width")),
    }
    if pci_class.startswith(GPU_CLASSES) and _text(path / "vendor") == NVIDIA:
        return Device(kind="GPU", **known)
    if pci_class.startswith(load_fabric(fabric).pci_class):
        return Device(kind="NIC", **known, **_port(path / "infiniband"))
    return None


def _port(rdma_devices: Path) -> dict[str, Any]:
    """Name, rate and state of the first RDMA device. A NIC without an RDMA device has no driver loaded."""
    names = sorted(path.name for path in rdma_devices.iterdir()) if rdma_devices.is_dir() else []
    if not names:
        return {"state": "no RDMA device"}
    port = rdma_devices / names[0] / "ports/1"
    rate = re.match(r"\d+(\.\d+)?", _text(port / "rate") or "")  # "400 Gb/sec (4X NDR)"
    state = _text(port / "state")  # "4: ACTIVE"
    return {
        "name": names[0],
        "rate_gbit_s": float(rate[0]) if rate else None,
        "state": state.rpartition(": ")[2] if state else None,
    }


def _cpus(path: Path) -> int | None:
    text = _text(path)
    if text is None:
        return None
    return (
        cpus.listed(text) if re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", text, re.ASCII) else 0
    )


def _positive(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and int(text) > 0 else None


def _text(path: Path) -> str | None:
    """Reads one attribute; None if it is missing or the device does not respond."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
