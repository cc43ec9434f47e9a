from __future__ import annotations

import pytest

from hpcgen.errors import HpcgenError
from hpcgen.topology import sysfs
from hpcgen.topology.compare import differences
from hpcgen.topology.node import Topology, expected
from tests.topology.nodes import shipped_node_type, write_sysfs


@pytest.mark.parametrize("name", ["ndv4", "ndv5", "ndv5-h200"])
def test_a_healthy_node(tmp_path, name):
    node_type = shipped_node_type(name)
    found = sysfs.read(write_sysfs(tmp_path, node_type), "infiniband")
    assert differences(expected(name, node_type), found) == ()
    assert (len(found.of_kind("GPU")), len(found.of_kind("NIC"))) == (8, 8)


def test_facts_hidden_by_the_hypervisor_stay_unknown(tmp_path):
    """As measured in a virtual machine with one H200: NUMA node -1; a device without a link has no files."""
    node_type = shipped_node_type("ndv5")
    write_sysfs(tmp_path, node_type)
    for path in (tmp_path / "bus/pci/devices").iterdir():
        (path / "numa_node").write_text("-1\n")
        (path / "current_link_speed").unlink(missing_ok=True)
        if (path / "current_link_width").exists():
            (path / "current_link_width").write_text("0\n")
    found = sysfs.read(tmp_path, "infiniband")
    assert {device.numa for device in found.devices} == {None}
    assert differences(expected("ndv5", node_type), found) == ()


def test_memory_without_cpus_is_not_a_difference(tmp_path):
    """As accelerators have it that show their memory as a NUMA node."""
    node_type = shipped_node_type("ndv5")
    write_sysfs(tmp_path, node_type)
    (tmp_path / "devices/system/node/node2").mkdir()
    (tmp_path / "devices/system/node/node2/cpulist").write_text("\n")
    assert differences(expected("ndv5", node_type), sysfs.read(tmp_path, "infiniband")) == ()


def test_adapters_of_the_fabric_count(tmp_path):
    write_sysfs(tmp_path, shipped_node_type("ndv5"))
    for fabric in ("ethernet", "roce"):
        names = [device.name for device in sysfs.read(tmp_path, fabric).of_kind("NIC")]
        assert names == ["mlx5_an0"]


def test_no_sysfs(tmp_path):
    with pytest.raises(
        HpcgenError, match="bus/pci/devices: no such directory; give the /sys of a Linux node"
    ):
        sysfs.read(tmp_path, "infiniband")


def test_a_machine_without_pci(tmp_path):
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    assert sysfs.read(tmp_path, "infiniband") == Topology(numa_nodes=(), devices=())


def test_this_machine_is_read(tmp_path):
    """Whatever it has: a container, a laptop or a node."""
    from pathlib import Path

    if not Path("/sys/bus/pci/devices").is_dir():
        pytest.skip("no PCI here")
    sysfs.read(Path("/sys"), "infiniband")
