from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

import pytest

from hpcgen.topology import markup, nccl_xml
from hpcgen.topology.compare import differences
from hpcgen.topology.node import expected
from tests.topology.nodes import azure_xml, shipped_node_type

# A tree by meaning: tag, attributes, and the children in any order.
Meaning = tuple[str, frozenset[tuple[str, str]], frozenset]


def meaning(element: ElementTree.Element) -> Meaning:
    children = Counter(meaning(child) for child in element)
    return element.tag, frozenset(element.attrib.items()), frozenset(children.items())


def topology(text: str):
    return nccl_xml.topology(markup.parse(text.encode(), "t.xml"), "t.xml")


@pytest.mark.parametrize("name", ["ndv5", "ndv5-h200"])
def test_ndv5_is_azures_file_attribute_by_attribute(name):
    ours = ElementTree.fromstring(nccl_xml.write(name, shipped_node_type(name)))
    assert meaning(ours) == meaning(ElementTree.fromstring(azure_xml("ndv5")))


@pytest.mark.parametrize("name", ["ndv4", "ndv5", "ndv5-h200"])
def test_azures_file_matches_the_facts(name):
    """ndv4's file writes "16 GT/s" and gives its bridges no maker: the same to NCCL, though not the same text."""
    azure = topology(azure_xml(name.removesuffix("-h200")))
    assert differences(expected(name, shipped_node_type(name)), azure) == ()


@pytest.mark.parametrize("name", ["ndv4", "ndv5", "ndv5-h200"])
def test_a_written_file_reads_back_as_the_facts(name):
    node_type = shipped_node_type(name)
    read = topology(nccl_xml.write(name, node_type))
    assert differences(expected(name, node_type), read) == ()
    assert (len(read.of_kind("GPU")), len(read.of_kind("NIC"))) == (8, 8)


def test_nccls_own_parser_accepts_the_text():
    """Its src/graph/xml.cc knows no declaration and no entity, and at most 255 characters of a value."""
    text = nccl_xml.write("ndv5", shipped_node_type("ndv5"))
    assert text.startswith("<!-- Azure ND96isr_H100_v5")
    assert "<?" not in text
    assert "&" not in text
    assert "\t" not in text
    values = [value for element in ElementTree.fromstring(text).iter() for value in element.attrib.values()]
    assert max(map(len, values)) < 255


def test_a_description_cannot_end_the_comment():
    from dataclasses import replace

    node_type = replace(shipped_node_type("ndv5"), description="a --> <b> & c --")
    assert ElementTree.fromstring(nccl_xml.write("ndv5", node_type)).tag == "system"


def test_a_node_whose_devices_are_attached_to_the_cpu():
    from dataclasses import replace

    node_type = shipped_node_type("ndv5")
    flat = replace(
        node_type,
        gpus=tuple(replace(gpu, bridge=None) for gpu in node_type.gpus),
        nics=tuple(replace(nic, bridge=None) for nic in node_type.nics),
    )
    text = nccl_xml.write("flat", flat)
    assert "0x060400" not in text
    assert differences(expected("flat", flat), topology(text)) == ()
    assert differences(expected("flat", flat), topology(azure_xml("ndv5"))) == ()


def test_a_dump_of_nccl_is_read():
    """NCCL_TOPO_DUMP_FILE adds what it detected: <gpu>, <nic>, other PCI functions and a host hash."""
    text = """\
<system version="1">
  <cpu host_hash="0x1" numaid="0" affinity="ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="207">
    <pci busid="0000:00:06.0" class="0x030200" vendor="0x10de" link_speed="32.0 GT/s PCIe" link_width="16">
      <gpu dev="0" sm="90" rank="0" gdr="0"><nvlink target="0000:05:00.0" count="18" tclass="0x068000"/></gpu>
    </pci>
    <nic><net name="eth0" dev="0" speed="10000" port="0" guid="0x0" maxconn="65536" gdr="0"/></nic>
  </cpu>
</system>
"""
    read = topology(text)
    assert [device.bus_id for device in read.devices] == ["0000:00:06.0"]
    assert read.numa_nodes[0].cpus == 0xFFFF
