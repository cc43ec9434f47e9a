"""Doubts about a site's files that are valid but probably wrong: facts of other machines, and of another network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

from hpcgen.config.document import Document
from hpcgen.config.fabric import fabric_of, load_fabric
from hpcgen.config.inheritance import inherit
from hpcgen.config.node_type import Exclusion, FabricName, NodeType
from hpcgen.config.shown import show
from hpcgen.errors import Problem, file_of

HARDWARE = (
    *("gpus_per_node", "gpus", "nics", "nics_per_node", "fabric", "processor", "cpus_per_node", "numa_nodes"),
    *("pci_link", "vm_sizes", "gpu_model", "nvlink"),
)
"""Facts whose change means another machine."""
OF_MACHINE = (
    *("topology_file", "nics"),
    *(f"health.{key}" for key in ("memory_mb", "nvme_disks", "ib_gdr_gbit_s", "all_reduce")),
)
"""Facts that name devices or files of a machine, or were measured on it."""
_NAMES_DEVICE = re.compile(r"(IFNAME|NET_DEVICES|_HCA|_INTERFACE|_DEV|TOPO_FILE)$")
_DEVICE = re.compile(r"[=^]*(/|mlx\d|eth\d|en[ops]\d|ib\d|hsn|cxi|rdmap|bond)")


def inherited_devices(family: Mapping[Path, Document], merged: Document) -> Iterator[Problem]:
    """Yields what a node type inherits of a machine, although a file above changes the hardware.

    `family` has the files of the node type; each comes before those that it extends.
    """
    files, documents = [str(path) for path in family], list(family.values())
    for path in _of_machine(merged):
        where = merged.origin(path) or ""
        if (file := file_of(where)) not in files:
            continue  # the fabric's own
        level = files.index(file)
        change = _change(documents[:level], inherit(NodeType, documents[level:]))
        if change is None:
            continue
        value = merged.get(path)
        shown = f" = {show(value)}" if isinstance(value, str | int | float) else ""
        reason = f"inherits {path.removesuffix('.value')}{shown} ({where}), but {change}"
        hint = "set it, or remove it with null ([] for a list), or set same_devices: true if the machines have it too"
        yield Problem("node_type", reason, hint, "cluster")


def _of_machine(document: Document) -> Iterator[str]:
    """Yields the paths of facts about a machine."""
    yield from (path for path in OF_MACHINE if document.get(path) not in (None, [], {}))
    for section in ("environment", "sharp"):
        for name, entry in document.values.get(section, {}).items():
            value = entry.get("value") if isinstance(entry, dict) else None
            if _NAMES_DEVICE.search(name) or (isinstance(value, str) and _DEVICE.match(value)):
                yield f"{section}.{name}.value"


def _change(above: Sequence[Document], below: Document) -> str | None:
    """The first change of the hardware in `above` that no file in or over it calls harmless."""
    for level, document in enumerate(above):
        if any(other.values.get("same_devices") is True for other in above[: level + 1]):
            continue
        for key in HARDWARE:
            if key in document.values and _differs(document.values[key], below.get(key)):
                return f"{document.origin(key)} changes {key}"
    return None


def _differs(value: Any, inherited: Any) -> bool:
    if isinstance(value, dict) and isinstance(inherited, dict):
        return any(inherited.get(key) != item for key, item in value.items())
    return inherited is not None and value != inherited


def fabric_contradictions(node_type: NodeType) -> Iterator[Problem]:
    """Yields NICs whose names are those of another network."""
    fabric = fabric_of(node_type)
    strange = [nic.name for nic in node_type.nics if fabric and not fabric.names(nic.name)]
    for name in get_args(FabricName) if strange else ():
        if load_fabric(name).names(strange[0]):
            reason = f"has fabric {node_type.fabric}, but its NIC {strange[0]} is named like one of {name}"
            yield Problem("node_type", reason, "correct fabric or nics in the node type", "cluster")
            return


def excluded(variables: Mapping[str, str], node_type: NodeType) -> Iterator[tuple[str, str]]:
    """Yields the names of variables that contradict the nodes' network, each with the reason."""
    for name, value in variables.items():
        exclusion = _exclusion(name, node_type)
        if exclusion is not None:
            yield (
                name,
                f"must not be set with fabric {node_type.fabric}: {exclusion.why} [{exclusion.source}]",
            )
        elif name == "NCCL_NET" and (reason := _other_network(value, node_type)):
            yield name, reason


def _exclusion(name: str, node_type: NodeType) -> Exclusion | None:
    return next(
        (each for pattern, each in node_type.must_not_set.items() if fnmatchcase(name, pattern)), None
    )


def _other_network(value: str, node_type: NodeType) -> str | None:
    fabric = fabric_of(node_type)
    if fabric is None or node_type.fabric == "ethernet":
        return None
    usual = fabric.environment.get("NCCL_NET")
    if usual is not None and value != usual.value:
        return f"is {value}, but NCCL reaches fabric {node_type.fabric} with {usual.value}"
    if value == "Socket":
        return f"is {value}, so NCCL uses TCP and not fabric {node_type.fabric}"
    return None
