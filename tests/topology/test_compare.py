from __future__ import annotations

import dataclasses

import pytest

from hpcgen.topology import compare, markup, nccl_xml, sysfs
from hpcgen.topology.compare import differences
from hpcgen.topology.node import Device, NumaNode, expected
from tests.topology.nodes import azure_xml, shipped_node_type, write_sysfs


def said_of_xml(*replacements: tuple[str, str]) -> list[str]:
    """The differences when Azure's ndv5 file is changed."""
    text = azure_xml("ndv5")
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    found = nccl_xml.topology(markup.parse(text.encode(), "t.xml"), "t.xml")
    return [str(difference) for difference in differences(expected("ndv5", shipped_node_type("ndv5")), found)]


GPU_3 = '<pci busid="0008:00:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"/>'
NIC_1 = '<pci busid="0102:00:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"/>'


def test_swapped_nics_are_named():
    assert said_of_xml(("0101:", "x:"), ("0102:", "0101:"), ("x:", "0102:")) == [
        "NIC mlx5_ib0 (0101:00:00.0): GPUs on its bridge: expected 0001:00:00.0, found 0002:00:00.0",
        "NIC mlx5_ib1 (0102:00:00.0): GPUs on its bridge: expected 0002:00:00.0, found 0001:00:00.0",
    ]


def test_nics_of_the_wrong_socket_are_named():
    found = said_of_xml(("0101:", "x:"), ("0108:", "0101:"), ("x:", "0108:"))
    assert "NIC mlx5_ib0 (0101:00:00.0): NUMA node: expected 0, found 1" in found
    assert "NIC mlx5_ib7 (0108:00:00.0): NUMA node: expected 1, found 0" in found
    assert len(found) == 4


def test_a_missing_gpu_is_named():
    assert said_of_xml((GPU_3, "")) == [
        "GPU 3 (0008:00:00.0): missing",
        "NIC mlx5_ib3 (0104:00:00.0): GPUs on its bridge: expected 0008:00:00.0, found none",
    ]


def test_a_missing_nic_and_one_too_many():
    assert said_of_xml(("0102:", "0109:")) == [
        "NIC mlx5_ib1 (0102:00:00.0): missing",
        "NIC 0109:00:00.0: not expected",
    ]
    assert said_of_xml((NIC_1, NIC_1 + NIC_1.replace("0102", "0109"))) == ["NIC 0109:00:00.0: not expected"]


def test_a_slow_link_is_named():
    slow = GPU_3.replace("32.0 GT/s", "16.0 GT/s").replace('"16"', '"8"')
    assert said_of_xml((GPU_3, slow)) == [
        "GPU 3 (0008:00:00.0): PCIe speed: expected 32 GT/s, found 16 GT/s",
        "GPU 3 (0008:00:00.0): PCIe width: expected x16, found x8",
    ]


def test_a_slow_bridge_is_reported_for_its_devices():
    bridge = 'busid="ffff:ff:02.0" class="0x060400" link_speed="'
    assert said_of_xml((f"{bridge}32.0", f"{bridge}16.0")) == [
        "GPU 1 (0002:00:00.0): PCIe speed of its bridge: expected 32 GT/s, found 16 GT/s",
        "NIC mlx5_ib1 (0102:00:00.0): PCIe speed of its bridge: expected 32 GT/s, found 16 GT/s",
    ]


def test_other_cpus_are_named():
    assert said_of_xml(
        ("ffffffff,ffff0000,00000000", "ffff0000,00000000"), ('modelid="143"', 'modelid="207"')
    ) == [
        "NUMA node 0: model: expected 143, found 207",
        "NUMA node 1: CPUs: expected 48-95, found 48-63",
        "NUMA node 1: model: expected 143, found 207",
    ]


def test_numa_nodes_that_are_missing_or_too_many():
    found = said_of_xml(('numaid="1"', 'numaid="2"'))
    assert found[:2] == ["NUMA node 1: missing", "NUMA node 2: not expected"]
    assert "GPU 4 (0009:00:00.0): NUMA node: expected 1, found 2" in found


def test_bridge_addresses_and_unknown_attributes_are_not_compared():
    assert (
        said_of_xml(("ffff:ff:0", "ffff:fe:0"), (' link_speed="32.0 GT/s PCIe"', ""), (' arch="x86_64"', ""))
        == []
    )


GPU_4, NIC_2 = "GPU 4 (0009:00:00.0)", "NIC mlx5_ib2 (0103:00:00.0)"
PORT = "0103:00:00.0/infiniband/mlx5_ib2/ports/1"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("0009:00:00.0/numa_node", "0", f"{GPU_4}: NUMA node: expected 1, found 0"),
        (
            "0009:00:00.0/current_link_speed",
            "8.0 GT/s PCIe",
            f"{GPU_4}: PCIe speed: expected 32 GT/s, found 8 GT/s",
        ),
        ("0103:00:00.0/current_link_width", "4", f"{NIC_2}: PCIe width: expected x16, found x4"),
        (f"{PORT}/rate", "200 Gb/sec (4X HDR)", f"{NIC_2}: rate: expected 400 Gb/s, found 200 Gb/s"),
        (f"{PORT}/state", "1: DOWN", f"{NIC_2}: port: expected ACTIVE, found DOWN"),
        ("0103:00:00.0/class", "0x010802", f"{NIC_2}: missing"),
    ],
)
def test_problems_of_a_live_node_are_named(tmp_path, path, value, said):
    node_type = shipped_node_type("ndv5")
    write_sysfs(tmp_path, node_type)
    target = tmp_path / "bus/pci/devices" / path
    assert target.read_text().strip() != value
    target.write_text(f"{value}\n")
    found = differences(expected("ndv5", node_type), sysfs.read(tmp_path, "infiniband"))
    assert [str(difference) for difference in found] == [said]


def test_nics_with_another_name_or_without_a_driver(tmp_path):
    node_type = shipped_node_type("ndv5")
    pci = write_sysfs(tmp_path, node_type) / "bus/pci/devices"
    (pci / "0101:00:00.0/infiniband/mlx5_ib0").rename(pci / "0101:00:00.0/infiniband/mlx5_0")
    (pci / "0102:00:00.0/infiniband").rename(pci / "0102:00:00.0/net")
    found = differences(expected("ndv5", node_type), sysfs.read(tmp_path, "infiniband"))
    assert [str(difference) for difference in found] == [
        "NIC mlx5_ib0 (0101:00:00.0): RDMA device: expected mlx5_ib0, found mlx5_0",
        "NIC mlx5_ib1 (0102:00:00.0): port: expected ACTIVE, found no RDMA device",
    ]


def test_every_attribute_is_compared():
    assert {field.name for field in dataclasses.fields(NumaNode)} == {*compare.NUMA_ATTRIBUTES, "number"}
    assert {field.name for field in dataclasses.fields(Device)} == {
        *compare.DEVICE_ATTRIBUTES,
        "kind",
        "bus_id",
    }
