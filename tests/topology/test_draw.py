from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from hpcgen.errors import HpcgenError
from hpcgen.topology import svg, text
from hpcgen.topology.layout import pcie, pcie_gb_s
from tests.rendering.scripts import HOSTILE_WORDS
from tests.topology.nodes import shipped_node_type

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", ["ndv4", "ndv5", "ndv5-h200"])
def test_both_pictures_name_every_device(name):
    node_type = shipped_node_type(name)
    words = texts(svg.draw(name, node_type))
    plain = text.draw(name, node_type)
    for index, (gpu, nic) in enumerate(zip(node_type.gpus, node_type.nics, strict=True)):
        wanted = [f"GPU {index}", gpu.bus_id, nic.bus_id]
        assert all(word in words and word in plain for word in wanted)
        assert any(nic.name in word for word in words)
        assert nic.name in plain
    for number, numa in enumerate(node_type.numa_nodes):
        assert f"NUMA {number} · CPUs {numa.cpus.replace('-', '–')}" in words
        assert f"NUMA {number}  CPUs {numa.cpus}" in plain


def test_pairs_share_a_branch_of_the_tree():
    lines = text.draw("ndv4", shipped_node_type("ndv4")).splitlines()
    at = lines.index("NUMA 1  CPUs 24-47")
    assert [line.split()[1:4] for line in lines[at + 2 : at + 6]] == [
        ["GPU", "0", "0001:00:00.0"],
        ["mlx5_ib0", "0101:00:00.0", "200"],
        ["GPU", "1", "0002:00:00.0"],
        ["mlx5_ib1", "0102:00:00.0", "200"],
    ]


@pytest.mark.parametrize("name", ["ndv4", "ndv5"])
def test_nothing_is_outside_the_picture_or_overlaps_another_card(name):
    root = ElementTree.fromstring(svg.draw(name, shipped_node_type(name)))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    cards = []
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.attrib.get(key, 0)) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
        if rect.attrib.get("class") in ("gpu", "nic", "bridge", "cpu", "nvlink", "fabric"):
            cards.append((x, y, x + w, y + h))
    assert len(cards) == {"ndv5": 28, "ndv4": 26}[name]
    for index, (left, top, right, bottom) in enumerate(cards):
        for other in cards[index + 1 :]:
            apart = right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
            assert apart, (cards[index], other)


@pytest.mark.parametrize("hostile", [*HOSTILE_WORDS, '"><script>alert(1)</script>', "]]>", "&amp;"])
def test_texts_are_escaped(hostile):
    printable = "".join(character for character in hostile if character.isprintable())
    node_type = replace(shipped_node_type("ndv5"), description=printable, gpu_model=printable)
    picture = svg.draw("ndv5", node_type)
    assert printable in texts(picture)
    assert "<script" not in picture


def test_a_long_name_is_cut_and_kept_as_a_hint():
    node_type = shipped_node_type("ndv5")
    long = "x" * 63
    nics = (replace(node_type.nics[0], name=long), *node_type.nics[1:])
    root = ElementTree.fromstring(svg.draw("ndv5", replace(node_type, nics=nics)))
    [card] = [element for element in root.iter(f"{SVG}text") if element.findtext(f"{SVG}title") == long]
    assert "".join(card.itertext()).removeprefix(long) == "x" * 12 + "…"


@pytest.mark.parametrize("without", ["nics", "nvlink", "cpu_masks", "bridges"])
def test_unknown_facts_are_not_drawn(without):
    node_type = shipped_node_type("ndv5")
    if without == "bridges":
        node_type = replace(
            node_type,
            gpus=tuple(replace(gpu, bridge=None) for gpu in node_type.gpus),
            nics=tuple(replace(nic, bridge=None) for nic in node_type.nics),
        )
    else:
        node_type = replace(node_type, **{without: None if without == "nvlink" else ()})
    gone = {"nics": "mlx5_ib0", "nvlink": "NVLink", "cpu_masks": "rank 0", "bridges": "├─ PCIe"}[without]
    picture, plain = svg.draw("ndv5", node_type), text.draw("ndv5", node_type)
    assert gone not in " ".join(texts(picture)) + plain
    assert "GPU 7" in texts(picture)
    assert "GPU 7" in plain


def test_a_nic_on_another_socket_is_labeled():
    node_type = shipped_node_type("ndv5")
    nics = (replace(node_type.nics[0], numa=1), *node_type.nics[1:])
    crossed = replace(node_type, nics=nics)
    assert "400 Gb/s (NUMA 1)" in texts(svg.draw("ndv5", crossed))
    assert "400 Gb/s (NUMA 1)" in text.draw("ndv5", crossed)


def test_ascii_for_terminals_without_lines():
    assert text.draw("ndv5", shipped_node_type("ndv5"), ascii_only=True).isascii()


def test_a_node_without_gpus_has_no_picture():
    for draw in (svg.draw, text.draw):
        with pytest.raises(
            HpcgenError,
            match="node type cpu does not state gpus, numa_nodes, pci_link, which the diagram needs",
        ):
            draw("cpu", shipped_node_type("cpu"))


def test_bandwidths_of_pcie():
    """63 and 31.5 GB/s are PCI-SIG's figures for x16 of generations 5 and 4."""
    fifth, fourth = shipped_node_type("ndv5").pci_link, shipped_node_type("ndv4").pci_link
    assert (pcie(fifth), round(pcie_gb_s(fifth), 1)) == ("PCIe 5.0 x16", 63.0)
    assert (pcie(fourth), round(pcie_gb_s(fourth), 1)) == ("PCIe 4.0 x16", 31.5)
    assert pcie(replace(fifth, speed_gt_s=12.5)) == "PCIe 12.5 GT/s x16"
