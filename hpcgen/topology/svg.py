"""Draws a node as SVG: NVLink at the top, NUMA nodes with GPUs and NICs in the middle, the network at the bottom."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from hpcgen.config.node_type import NodeType
from hpcgen.topology.layout import (
    Bridge,
    NumaBox,
    Pair,
    arrange,
    fabric_words,
    nvlink_words,
    pcie,
    pcie_gb_s,
    rates,
)

MARGIN = 28
COLUMN, CARD = 144, 128
"""Width of a column and of the cards in it."""
CPU = 40
"""Width of the vertical CPU strip at the left of a NUMA node."""
PADDING, BETWEEN = 14, 22
"""Padding inside a NUMA node, and gap between two of them."""
BAND = 38
"""Height of the NVLink and network bands."""

TITLE_Y, SUBTITLE_Y = 42, 64
NVLINK_Y = 88
BOX_Y = NVLINK_Y + BAND + 26
GPU_Y, GPU_H = BOX_Y + PADDING, 88
BRIDGE_Y, BRIDGE_H = GPU_Y + GPU_H + 26, 26
NIC_Y, NIC_H = BRIDGE_Y + BRIDGE_H + 26, 70
BOX_END = NIC_Y + NIC_H + PADDING
FABRIC_Y = BOX_END + 26
HEIGHT = FABRIC_Y + BAND + 46

STYLE = """\
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2933; }
.title { font-size: 20px; font-weight: 700; }
.note { font-size: 12.5px; fill: #52606d; }
.head { font-size: 14.5px; font-weight: 700; }
.small { font-size: 11.5px; }
.address { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 11px; fill: #3e4c59; }
.light { fill: #ffffff; font-weight: 600; }
.numa { fill: #f5f7fa; stroke: #cbd2d9; }
.cpu { fill: #3e4c59; }
.gpu { fill: #e3f5d5; stroke: #5a8f29; stroke-width: 1.5; }
.nic { fill: #dceefb; stroke: #2b6cb0; stroke-width: 1.5; }
.bridge { fill: #ffffff; stroke: #7b8794; }
.nvlink { fill: #4c7a1f; }
.fabric { fill: #2b6cb0; }
.wire { fill: none; stroke: #7b8794; stroke-width: 2; }
.wire-root { stroke: #3e4c59; stroke-width: 8; }
.wire-nvlink { stroke: #4c7a1f; stroke-width: 7; }
.wire-fabric { stroke: #2b6cb0; stroke-width: 4; }
"""


def draw(name: str, node_type: NodeType) -> str:
    """Draws the diagram as an SVG document.

    Raises:
        HpcgenError: the node type lacks a fact that the diagram needs.
    """
    boxes = arrange(name, node_type)
    places = _places(boxes)
    width = places[-1] + _width(boxes[-1]) + MARGIN
    nvlink, fabric = nvlink_words(node_type), fabric_words(node_type)
    wires: list[str] = []
    cards: list[str] = []
    for box, x in zip(boxes, places, strict=True):
        _draw_box(box, x, node_type, wires, cards, has_nvlink=nvlink is not None)
    bands = [
        *(_band(NVLINK_Y, width, nvlink, "nvlink") if nvlink else ()),
        *(_band(FABRIC_Y, width, fabric, "fabric") if fabric else ()),
    ]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
        f'viewBox="0 0 {width} {HEIGHT}" role="img">',
        f"<title>{escape(f'Node type {name}: {node_type.description}')}</title>",
        f"<style>\n{STYLE}</style>",
        f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(MARGIN, TITLE_Y, name, "title"),
        _text(MARGIN, SUBTITLE_Y, node_type.description, "note"),
        *wires,
        *bands,
        *cards,
        _text(MARGIN, HEIGHT - 18, _legend(node_type), "note"),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _places(boxes: tuple[NumaBox, ...]) -> list[int]:
    """Left edge of each NUMA node."""
    places = [MARGIN]
    for box in boxes[:-1]:
        places.append(places[-1] + _width(box) + BETWEEN)
    return places


def _width(box: NumaBox) -> int:
    return CPU + PADDING + max(box.num_pairs, 1) * COLUMN + PADDING


def _draw_box(
    box: NumaBox, x: int, node_type: NodeType, wires: list[str], cards: list[str], *, has_nvlink: bool
) -> None:
    """Adds one NUMA node: its frame to the wires (drawn first), its CPU and devices to the cards (drawn last)."""
    width = _width(box)
    middle = BRIDGE_Y + BRIDGE_H // 2
    wires.append(_rect(x, BOX_Y, width, BOX_END - BOX_Y, "numa", 10))
    cards.append(_rect(x, BOX_Y, CPU, BOX_END - BOX_Y, "cpu", 10))
    words = f"NUMA {box.number} · CPUs {box.cpus.replace('-', '–')}"
    turn = f"rotate(-90 {x + CPU // 2} {(BOX_Y + BOX_END) // 2})"
    cards.append(
        _text(x + CPU // 2, (BOX_Y + BOX_END) // 2 + 5, _fit(words, 36), "head light", "middle", turn)
    )
    column = x + CPU + PADDING
    for bridge in box.bridges:
        centers = [column + COLUMN * place + COLUMN // 2 for place in range(len(bridge.pairs))]
        center = (centers[0] + centers[-1]) // 2
        wires.append(_wire(f"M {x + CPU} {middle} H {centers[-1]}", "wire-root"))
        for pair, place in zip(bridge.pairs, centers, strict=True):
            wires += _pair_wires(pair, bridge, place, middle, has_nvlink)
            cards += _pair_cards(pair, place)
        if bridge.bus_id is not None:
            cards += _bridge_card(bridge, centers, center, node_type)
        column += COLUMN * len(bridge.pairs)


def _pair_wires(pair: Pair, bridge: Bridge, x: int, middle: int, has_nvlink: bool) -> Iterator[str]:
    if pair.gpu is not None:
        yield _wire(f"M {x} {GPU_Y + GPU_H} V {middle}")
        if has_nvlink:
            yield _wire(f"M {x} {NVLINK_Y + BAND} V {GPU_Y}", "wire-nvlink")
    if pair.nics:
        if all(nic.bridge == bridge.bus_id and nic.numa in (None, pair.numa) for nic in pair.nics):
            yield _wire(f"M {x} {middle} V {NIC_Y}")
        yield _wire(f"M {x} {NIC_Y + NIC_H} V {FABRIC_Y}", "wire-fabric")


def _pair_cards(pair: Pair, x: int) -> Iterator[str]:
    left = x - CARD // 2
    if pair.gpu is not None:
        yield _rect(left, GPU_Y, CARD, GPU_H, "gpu", 8)
        yield _text(x, GPU_Y + 26, f"GPU {pair.index}", "head", "middle")
        yield _text(x, GPU_Y + 47, pair.gpu.bus_id, "address", "middle")
        if pair.cpus is not None:
            words = f"rank {pair.index}: CPUs {pair.cpus.replace('-', '–')}"
            yield _text(x, GPU_Y + 70, _fit(words, 21), "small", "middle", title=words)
    if pair.nics:
        names, first = ", ".join(nic.name for nic in pair.nics), pair.nics[0]
        yield _rect(left, NIC_Y, CARD, NIC_H, "nic", 8)
        yield _text(x, NIC_Y + 22, _fit(names, 13), "head", "middle", title=names)
        if len(pair.nics) == 1 and first.bus_id:
            yield _text(x, NIC_Y + 41, first.bus_id, "address", "middle")
        yield _text(x, NIC_Y + 59, f"{rates(pair.nics)}{pair.on_other_numa(first)}", "small", "middle")


def _bridge_card(bridge: Bridge, centers: list[int], center: int, node_type: NodeType) -> Iterator[str]:
    assert node_type.pci_link is not None
    half = (centers[-1] - centers[0]) // 2 + 48
    yield _rect(center - half, BRIDGE_Y, 2 * half, BRIDGE_H, "bridge", BRIDGE_H // 2)
    words = f"PCI bridge {bridge.bus_id}"
    yield _text(center, BRIDGE_Y + 17, pcie(node_type.pci_link), "small", "middle", title=words)


def _band(y: int, width: int, words: str, kind: str) -> Iterator[str]:
    yield _rect(MARGIN, y, width - 2 * MARGIN, BAND, kind, 10)
    yield _text(width // 2, y + BAND // 2 + 5, words, "head light", "middle")


def _legend(node_type: NodeType) -> str:
    assert node_type.pci_link is not None
    link = node_type.pci_link
    model = f"{node_type.gpus_per_node} x {node_type.gpu_model}; " if node_type.gpu_model else ""
    return f"{model}{pcie(link)} ({link.speed_gt_s:g} GT/s): {pcie_gb_s(link):.0f} GB/s each way"


def _rect(x: int, y: int, width: int, height: int, kind: str, radius: int) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"/>'


def _wire(path: str, kind: str = "") -> str:
    return f'<path class="{f"wire {kind}".strip()}" d="{path}"/>'


def _text(
    x: int, y: int, words: str, kind: str, anchor: str = "start", transform: str = "", title: str = ""
) -> str:
    turn = f' transform="{escape(transform)}"' if transform else ""
    tip = f"<title>{escape(title)}</title>" if title else ""
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}"{turn}>{tip}{escape(words)}</text>'


def _fit(words: str, length: int) -> str:
    return words if len(words) <= length else words[: length - 1] + "…"
