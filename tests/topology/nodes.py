"""Topologies to compare with: Azure's files, and a made-up /sys."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hpcgen.config import cpus
from hpcgen.config.node_type import NodeType
from hpcgen.config.node_types import load_node_type

AZURE = Path(__file__).parent / "azhpc-images"


shipped_node_type = cache(load_node_type)
"""The node type of that name, read once."""


def azure_xml(name: str) -> str:
    """The topology file on Azure's image."""
    return (AZURE / f"{name}-topo.xml").read_text()


def write_sysfs(directory: Path, node_type: NodeType) -> Path:
    """A /sys as a healthy node of that type shows it: no bridges, and devices that are none of NCCL's."""
    for number, numa in enumerate(node_type.numa_nodes):
        _attributes(directory / f"devices/system/node/node{number}", cpulist=numa.cpus)
    (directory / "devices/system/node/online").write_text("0-1\n")
    link = node_type.pci_link
    assert link is not None
    pci = directory / "bus/pci/devices"
    for device in (*node_type.gpus, *node_type.nics):
        local = cpus.listed(node_type.numa_nodes[device.numa].cpus)
        _attributes(
            pci / device.bus_id,
            numa_node=str(device.numa),
            local_cpus=cpus.words(local, 96),
            current_link_speed=f"{link.speed_gt_s:.1f} GT/s PCIe",
            current_link_width=str(link.width),
        )
    for gpu in node_type.gpus:
        _attributes(pci / gpu.bus_id, **{"class": "0x030200", "vendor": "0x10de"})
    for nic in node_type.nics:
        _attributes(pci / nic.bus_id, **{"class": "0x020700", "vendor": "0x15b3"})
        port = pci / nic.bus_id / "infiniband" / nic.name / "ports/1"
        _attributes(port, state="4: ACTIVE", rate=f"{nic.rate_gbit_s:g} Gb/sec (4X NDR)")
    # the hypervisor's display, and Azure's Ethernet with its RDMA device
    _attributes(pci / "0000:00:08.0", **{"class": "0x030000", "vendor": "0x1414", "numa_node": "-1"})
    _attributes(pci / "8abc:00:02.0", **{"class": "0x020000", "vendor": "0x15b3", "numa_node": "-1"})
    (pci / "8abc:00:02.0/infiniband/mlx5_an0").mkdir(parents=True)
    return directory


def _attributes(directory: Path, **values: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (directory / name).write_text(f"{value}\n")
