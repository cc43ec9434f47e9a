"""GPUs and the NICs that they use, for any numbers of both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcgen.config.node_type import Gpu, Nic, NodeType, NumaNode, PciLink, Processor
from hpcgen.errors import HpcgenError
from hpcgen.topology import markup, nccl_xml, svg, text
from hpcgen.topology.compare import differences
from hpcgen.topology.layout import nics_of_gpus
from hpcgen.topology.node import expected, unstated
from hpcgen.topology.sysfs import read
from tests.topology.nodes import shipped_node_type, write_sysfs


def node(gpus: str, nics: str, bridges: str = "") -> NodeType:
    """A node type. `gpus` and `nics` have the NUMA node of each device ("?" if unknown), `bridges` that of each NIC."""
    return NodeType(
        description="a node",
        device="cuda",
        gpus_per_node=len(gpus),
        numa_nodes=(NumaNode(cpus="0-3"), NumaNode(cpus="4-7")),
        pci_link=PciLink(speed_gt_s=32, width=16),
        fabric="infiniband",
        gpus=tuple(
            Gpu(
                bus_id=f"000{index}:00:00.0",
                numa=int(numa),
                bridge=f"ffff:00:0{index}.0" if str(index) in bridges else None,
            )
            for index, numa in enumerate(gpus)
        ),
        nics=tuple(
            Nic(
                name=f"n{index}",
                rate_gbit_s=100,
                numa=None if numa == "?" else int(numa),
                bridge=f"ffff:00:0{bridges[index]}.0" if bridges else None,
            )
            for index, numa in enumerate(nics)
        ),
    )


PAIRS = {
    "one each": ("0011", "0011", "", "0 1 2 3"),
    "one each, without places": ("0011", "????", "", "0 1 2 3"),
    "two for each GPU": ("01", "????", "", "01 23"),
    "three for two GPUs": ("01", "???", "", "0 12"),
    "one for each pair": ("0011", "??", "", "0 0 1 1"),
    "one for each pair, in the other order": ("0011", "10", "", "1 1 0 0"),
    "one for the node": ("0011", "?", "", "0 0 0 0"),
    "the NUMA nodes alternate": ("0011", "0101", "", "0 2 1 3"),
    "all NICs on one NUMA node": ("0011", "0000", "", "0 1 2 3"),
    "no NICs": ("01", "", "", "- -"),
    "bridges in another order": ("0011", "0011", "1032", "1 0 3 2"),
    "two NICs on each bridge": ("01", "0011", "0101", "02 13"),
    "a NIC on a bridge of its own": ("01", "001", "019", "0 1"),
}
"""NUMA nodes of GPUs, of NICs, bridges of NICs, and the NICs of each GPU."""


@pytest.mark.parametrize(("gpus", "nics", "bridges", "used"), PAIRS.values(), ids=PAIRS)
def test_gpus_use_the_nearest_nics(gpus, nics, bridges, used):
    node_type = node(gpus, nics, bridges)
    found = nics_of_gpus(node_type)
    assert [("".join(nic.name[1:] for nic in own) or "-") for own in found] == used.split()
    # each NIC is drawn once, whatever uses it
    plain, picture = text.draw("x", node_type), svg.draw("x", node_type)
    for nic in node_type.nics:
        assert plain.count(f"{nic.name} ") == 1
        assert nic.name in picture


def test_many_nics_of_a_gpu_share_a_card():
    picture = svg.draw("p5", node("01", "????????"))
    assert "4 x 100 Gb/s" in picture
    assert "n0, n1, n2, n3" in picture


def test_a_command_names_the_facts_that_it_needs():
    node_type = replace(node("01", "??"), processor=Processor(arch="x86_64"), pci_link=None)
    missing = "does not state {}, which"
    with pytest.raises(HpcgenError, match=missing.format("pci_link")):
        text.draw("x", node_type)
    keys = ["pci_link", "processor.vendor", "processor.family", "processor.model"]
    keys += [f"nics[].{key} (n0, n1)" for key in ("bus_id", "numa")]
    with pytest.raises(HpcgenError) as raised:
        nccl_xml.write("x", node_type)
    assert f"node type x does not state {', '.join(keys)}, which the topology file needs" in str(raised.value)


def test_the_topology_file_of_an_arm_processor_has_no_cpuid():
    node_type = replace(node("01", ""), processor=Processor(arch="aarch64"))
    written = nccl_xml.write("gh200", node_type)
    assert 'arch="arm64">' in written
    assert "vendor" not in written.replace("subsystem_vendor", "")


def test_a_nic_without_an_address_is_compared_by_its_name(tmp_path):
    node_type = shipped_node_type("ndv5")
    sysfs = read(write_sysfs(tmp_path, node_type), "infiniband")
    plain = replace(
        node_type, nics=tuple(Nic(name=nic.name, rate_gbit_s=nic.rate_gbit_s) for nic in node_type.nics)
    )
    assert differences(expected("x", plain), sysfs) == ()
    slow = replace(plain, nics=(replace(plain.nics[0], rate_gbit_s=800), *plain.nics[1:]))
    assert [str(found) for found in differences(expected("x", slow), sysfs)] == [
        "NIC mlx5_ib0: rate: expected 800 Gb/s, found 400 Gb/s"
    ]
    absent = replace(plain, nics=(*plain.nics, Nic(name="mlx5_ib8", rate_gbit_s=400)))
    assert [str(found) for found in differences(expected("x", absent), sysfs)] == ["NIC mlx5_ib8: missing"]
    file = nccl_xml.topology(markup.parse(nccl_xml.write("x", node_type).encode(), "x.xml"), "x.xml")
    assert differences(expected("x", plain, nics_have_names=False), file) == ()
    assert unstated(plain, nics_have_names=False) == [
        "nics[].bus_id (mlx5_ib0, mlx5_ib1, mlx5_ib2 and 5 more)"
    ]
    more = replace(plain, nics=(*plain.nics, Nic(name="mlx5_ib8", rate_gbit_s=400)))
    assert [str(found) for found in differences(expected("x", more, nics_have_names=False), file)] == [
        "NICs: number: expected 9, found 8"
    ]


def test_a_type_without_addresses_is_compared_in_what_it_states(tmp_path):
    """Such as h100-sxm and gb200-nvl72, whose addresses differ between sites."""
    node_type = shipped_node_type("ndv5")
    sysfs = read(write_sysfs(tmp_path, node_type), "infiniband")
    plain = replace(node_type, gpus=(), nics=(), numa_nodes=(), nics_per_node=8, cpus_per_node=96)
    assert differences(expected("x", plain), sysfs) == ()
    assert unstated(plain) == ["gpus", "numa_nodes", "nics"]
    other = replace(plain, gpus_per_node=4, nics_per_node=9, cpus_per_node=192)
    other = replace(other, pci_link=PciLink(speed_gt_s=64, width=16))
    found = [str(difference) for difference in differences(expected("x", other), sysfs)]
    assert found[:3] == [
        "CPUs: number: expected 192, found 96",
        "GPUs: number: expected 4, found 8",
        "GPU 0001:00:00.0: PCIe speed: expected 64 GT/s, found 32 GT/s",
    ]
    assert "NICs: number: expected 9, found 8" in found
    assert len(found) == 3 + 16
    fewer = replace(plain, nics_per_node=2)
    assert differences(expected("x", fewer), sysfs) == ()
