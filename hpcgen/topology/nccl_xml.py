"""NCCL's topology XML: written from a node type, and read for comparison.

NCCL's reader is src/graph/xml.cc and topo.cc. Its parser is simple: no XML declaration, no entities, one space between
attributes. NCCL finds GPUs and NICs by bus ID and takes missing attributes from sysfs.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from hpcgen.config import cpus
from hpcgen.config.fabric import fabric_of
from hpcgen.config.node_type import Gpu, Nic, NodeType, PciLink
from hpcgen.errors import FilePlace, HpcgenError
from hpcgen.topology import markup
from hpcgen.topology.markup import Element
from hpcgen.topology.node import Device, Kind, NumaNode, Topology, expected, lack, nics_without

VERSION = "1"
BRIDGE_CLASS, GPU_CLASS = "0x060400", "0x030200"
NO_IDS = dict.fromkeys(("vendor", "device", "subsystem_vendor", "subsystem_device"), "0x0000")
"""IDs of a virtual bridge, set explicitly because NCCL would otherwise look for them in sysfs."""


def write(name: str, node_type: NodeType) -> str:
    """Formats the topology file of a node type.

    Raises:
        HpcgenError: the node type lacks a fact that the file needs.
    """
    if missing := list(_missing(node_type)):
        lack(name, "the topology file", missing)
    root = _tree(expected(name, node_type), node_type)
    # Two hyphens would end the comment.
    comment = f"{node_type.description} (hpcgen topology xml {name})".replace("--", "- -")
    return f"<!-- {comment} -->\n" + "".join(_lines(root, 0))


def _missing(node_type: NodeType) -> Iterator[str]:
    """The keys of the facts that a topology file needs, and that the node type does not state."""
    yield from (key for key in ("gpus", "numa_nodes", "pci_link", "processor") if not getattr(node_type, key))
    processor = node_type.processor
    if processor and not processor.is_arm:  # NCCL reads these of x86 processors only
        yield from (
            f"processor.{key}" for key in ("vendor", "family", "model") if getattr(processor, key) is None
        )
    yield from (*nics_without(node_type, "bus_id"), *nics_without(node_type, "numa"))


def _tree(topology: Topology, node_type: NodeType) -> Element:
    num_cpus = max((numa.cpus or 0).bit_length() for numa in topology.numa_nodes)
    devices: tuple[Gpu | Nic, ...] = (*node_type.gpus, *node_type.nics)
    root = Element("system", {"version": VERSION}, 0)
    for numa in topology.numa_nodes:
        attributes: dict[str, object] = {
            "numaid": str(numa.number),
            "affinity": cpus.words(numa.cpus or 0, num_cpus),
            "arch": numa.arch,
            "vendor": numa.vendor,
            "familyid": numa.family,
            "modelid": numa.model,
        }
        known = {key: str(value) for key, value in attributes.items() if value is not None}
        below = [device for device in devices if device.numa == numa.number]
        root.children.append(Element("cpu", known, 0, list(_below_cpu(below, node_type))))
    return root


def _below_cpu(devices: Iterable[Gpu | Nic], node_type: NodeType) -> Iterator[Element]:
    assert node_type.pci_link is not None
    by_bridge = sorted(devices, key=lambda device: device.bridge or "")
    for bridge, below in groupby(by_bridge, key=lambda device: device.bridge):
        elements = [
            _pci(str(device.bus_id), _class(device, node_type), node_type.pci_link) for device in below
        ]
        if bridge is None:
            yield from elements
        else:
            above = _pci(bridge, BRIDGE_CLASS, node_type.pci_link)
            yield replace(above, attributes=above.attributes | NO_IDS, children=elements)


def _class(device: Gpu | Nic, node_type: NodeType) -> str:
    if isinstance(device, Gpu):
        return GPU_CLASS
    fabric = fabric_of(node_type)
    assert fabric is not None  # a node type with NICs names it
    return f"{fabric.pci_class}00"


def _pci(bus_id: str, pci_class: str, link: PciLink) -> Element:
    attributes = {
        "busid": bus_id,
        "class": pci_class,
        "link_speed": f"{link.speed_gt_s:.1f} GT/s PCIe",  # NCCL accepts only certain strings
        "link_width": str(link.width),
    }
    return Element("pci", attributes, 0)


def _lines(element: Element, depth: int) -> Iterator[str]:
    attributes = "".join(f' {key}="{html.escape(value)}"' for key, value in element.attributes.items())
    indent = "  " * depth
    if not element.children:
        yield f"{indent}<{element.tag}{attributes}/>\n"
        return
    yield f"{indent}<{element.tag}{attributes}>\n"
    for child in element.children:
        yield from _lines(child, depth + 1)
    yield f"{indent}</{element.tag}>\n"


def read(path: Path) -> Topology:
    """Reads a topology file from Azure, from hpcgen, or from an NCCL dump (NCCL_TOPO_DUMP_FILE).

    Raises:
        HpcgenError: the file is unreadable, or not a topology file.
    """
    return topology(markup.read(path), str(path))


def topology(root: Element, name: str) -> Topology:
    """Converts the elements below `root` to a topology. `name` is the file name in errors.

    Raises:
        HpcgenError: the document is not a topology file.
    """
    if root.tag != "system" or root.attributes.get("version") != VERSION:
        found = f"<{root.tag} version={root.attributes.get('version')!r}>"
        raise HpcgenError(
            f"not an NCCL topology file: it starts with {found}",
            f'expected <system version="{VERSION}">',
            where=FilePlace(name, root.line),
        )
    numa_nodes: list[NumaNode] = []
    devices: list[Device] = []
    for element in root.all("cpu"):
        numa = _numa_node(element, name)
        numa_nodes.append(numa)
        devices += _devices(element, numa.number, name)
    _refuse_repeated("numaid", [str(numa.number) for numa in numa_nodes], name)
    _refuse_repeated("busid", [str(device.bus_id) for device in devices], name)
    return Topology(
        numa_nodes=tuple(sorted(numa_nodes, key=lambda numa: numa.number)),
        devices=tuple(sorted(devices, key=lambda device: device.bus_id or "")),
    )


def _refuse_repeated(key: str, values: list[str], name: str) -> None:
    if repeated := [value for value, count in Counter(values).items() if count > 1]:
        raise HpcgenError(
            f"duplicate {key} {', '.join(repeated[:8])}", "remove the duplicates", where=FilePlace(name)
        )


def _numa_node(element: Element, name: str) -> NumaNode:
    affinity = element.attributes.get("affinity")
    try:
        mask = None if affinity is None else cpus.from_words(affinity)
    except ValueError:
        raise HpcgenError(
            f"affinity = {affinity!r:.60} is not a CPU mask",
            "expected words such as 0000ffff,ffffffff",
            where=FilePlace(name, element.line),
        ) from None
    number = _number(element, "numaid", name)
    if number is None:
        raise HpcgenError("<cpu> has no numaid", where=FilePlace(name, element.line))
    return NumaNode(
        number=number,
        cpus=mask,
        arch=element.attributes.get("arch"),
        vendor=element.attributes.get("vendor"),
        family=_number(element, "familyid", name),
        model=_number(element, "modelid", name),
    )


def _devices(parent: Element, numa: int, name: str) -> list[Device]:
    """GPUs and NICs below a CPU or a bridge, with the attributes of that bridge."""
    found: list[Device] = []
    deeper: list[Device] = []
    for element in parent.all("pci"):
        kind = _kind(element)
        if kind is None:
            deeper += _devices(element, numa, name)
        else:
            found.append(_device(element, kind, numa, name))
    if parent.tag == "pci":
        speed, width = _link(parent, name)
        found = [replace(device, bridge_speed_gt_s=speed, bridge_width=width) for device in found]
        gpus = tuple(sorted(str(device.bus_id) for device in found if device.kind == "GPU"))
    else:
        gpus = ()
    return [
        *(replace(device, gpus_on_bridge=gpus) if device.kind == "NIC" else device for device in found),
        *deeper,
    ]


def _kind(element: Element) -> Kind | None:
    """Kind of a PCI device by its class, as in NCCL; None for bridges and other devices."""
    pci_class = element.attributes.get("class", "").lower()
    if pci_class.startswith("0x03"):
        return "GPU"
    return "NIC" if pci_class.startswith("0x02") else None


def _device(element: Element, kind: Kind, numa: int, name: str) -> Device:
    bus_id = element.attributes.get("busid", "").lower()
    if not re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", bus_id):
        raise HpcgenError(f"busid = {bus_id!r:.60} is not a PCI address", where=FilePlace(name, element.line))
    speed, width = _link(element, name)
    return Device(kind=kind, bus_id=bus_id, numa=numa, link_speed_gt_s=speed, link_width=width)


def _link(element: Element, name: str) -> tuple[float | None, int | None]:
    """Speed and width of a link. In NCCL, a width of 0 means unknown."""
    speed = link_speed(element.attributes.get("link_speed", ""))
    return speed, _number(element, "link_width", name) or None


def link_speed(text: str) -> float | None:
    """Parses a link speed (GT/s) of the kernel: "32.0 GT/s PCIe", "16 GT/s". None for other text ("Unknown")."""
    found = re.match(r"(\d{1,4}(?:\.\d{1,3})?) GT/s", text)
    return float(found[1]) if found else None


def _number(element: Element, key: str, name: str) -> int | None:
    text = element.attributes.get(key)
    if text is None or text == "":
        return None
    if not re.fullmatch(r"-?\d{1,9}", text, re.ASCII):
        raise HpcgenError(f"{key} = {text!r:.60} is not an integer", where=FilePlace(name, element.line))
    return int(text)
