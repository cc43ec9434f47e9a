"""Draws a node as text, for terminals and job logs."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.config.node_type import NodeType
from hpcgen.topology.layout import Bridge, Pair, arrange, fabric_words, nvlink_words, pcie, pcie_gb_s

ASCII = str.maketrans({"├": "|", "└": "`", "│": "|", "─": "-"})


def draw(name: str, node_type: NodeType, *, ascii_only: bool = False) -> str:
    """Draws the diagram; use `ascii_only` for terminals without line-drawing characters.

    Raises:
        HpcgenError: the node type lacks a fact that the diagram needs.
    """
    text = "\n".join(_lines(name, node_type)) + "\n"
    return text.translate(ASCII) if ascii_only else text


def _lines(name: str, node_type: NodeType) -> Iterator[str]:
    boxes = arrange(name, node_type)
    assert node_type.pci_link is not None
    link = node_type.pci_link
    yield f"{name}: {node_type.description}"
    for box in boxes:
        yield ""
        yield f"NUMA {box.number}  CPUs {box.cpus}"
        for index, bridge in enumerate(box.bridges):
            is_last = index == len(box.bridges) - 1
            yield from _bridge(bridge, node_type, is_last=is_last)
    yield ""
    yield f"{pcie(link)}: {link.speed_gt_s:g} GT/s, {pcie_gb_s(link):.0f} GB/s each way"
    yield from filter(None, (nvlink_words(node_type), fabric_words(node_type)))


def _bridge(bridge: Bridge, node_type: NodeType, *, is_last: bool) -> Iterator[str]:
    assert node_type.pci_link is not None
    devices = [words for pair in bridge.pairs for words in _devices(pair, node_type)]
    if bridge.bus_id is None:
        for index, words in enumerate(devices):
            yield f"{'└' if is_last and index == len(devices) - 1 else '├'}─ {words}"
        return
    yield f"{'└' if is_last else '├'}─ {pcie(node_type.pci_link)}"
    for index, words in enumerate(devices):
        corner = "└" if index == len(devices) - 1 else "├"
        yield f"{' ' if is_last else '│'}  {corner}─ {words}"


def _devices(pair: Pair, node_type: NodeType) -> Iterator[str]:
    width = max(len("GPU 00"), *(len(nic.name) for nic in node_type.nics), 0)
    if pair.gpu is not None:
        rank = f"  rank {pair.index}: CPUs {pair.cpus}" if pair.cpus is not None else ""
        yield f"{f'GPU {pair.index}':<{width}}  {pair.gpu.bus_id}{rank}"
    for nic in pair.nics:
        words = (f"{nic.name:<{width}}", nic.bus_id, f"{nic.rate_gbit_s:g} Gb/s{pair.on_other_numa(nic)}")
        yield "  ".join(filter(None, words))
