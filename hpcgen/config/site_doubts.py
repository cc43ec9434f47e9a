"""Doubts about a site's files that are valid but probably wrong: facts of other machines, and of another network."""

from __future__ import annotations

import functools
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
from hpcgen.config.variable_values import names_rdma_device
from hpcgen.errors import Problem, file_of
from hpcgen.text import few, one_of

HARDWARE = (
    *(
        "site",
        "gpus_per_node",
        "gpus",
        "nics",
        "nics_per_node",
        "fabric",
        "processor",
        "cpus_per_node",
        "numa_nodes",
    ),
    *("pci_link", "vm_sizes", "gpu_model", "nvlink"),
)
"""Facts whose change means another machine."""
OF_MACHINE = (
    *("topology_file", "nics"),
    *(f"health.{key}" for key in ("memory_mb", "nvme_disks", "ib_gdr_gbit_s", "all_reduce")),
)
"""Facts that name devices or files of a machine, or were measured on it."""
GOES_WITH = {
    "gpu_model": ("gpu_memory_gib",),
    "gpu_memory_gb_s": ("gpu_model", "gpu_memory_gib"),
    "nvlink.switches": ("gpus_per_node",),
    "fabric": ("site",),
    "nics_per_node": ("site", "gpus_per_node", "vm_sizes"),
}
"""A fact -> facts of which it is true only together with their values."""
_SAME_MEMORY = 0.12
"""Sizes of one GPU's memory differ by so much between data sheets and drivers."""
SITES = {
    "aws": r"AWS|Amazon|EC2|p\d\w*\.\d*xlarge",
    "azure": r"Azure|CycleCloud|Standard_N\w+",
    "gcp": r"GCP|Google|a\d-(high|mega|ultra)gpu-\w+",
    "oci": r"OCI|Oracle|BM\.GPU\.\w+",
    "cscs": r"CSCS|Alps",
    "coreweave": r"CoreWeave",
    "nebius": r"Nebius",
    "crusoe": r"Crusoe",
}
"""Cloud or center -> words of descriptions that name it or its machines."""
_NAMES_DEVICE = re.compile(r"(IFNAME|NET_DEVICES|_HCA|_INTERFACE|_DEV|TOPO_FILE)$")
_DEVICE = re.compile(r"[=^]*(/|mlx\d|eth\d|en[ops]\d|ib\d|hsn|cxi|rdmap|bond)")


def inherited_devices(family: Mapping[Path, Document], merged: Document) -> Iterator[Problem]:
    """Yields what a node type inherits of a machine, although a file above changes the hardware.

    `family` has the files of the node type; each comes before those that it extends.
    """
    files, documents = [str(path) for path in family], list(family.values())
    inherited_at = functools.cache(lambda level: inherit(NodeType, documents[level:]))
    wanted: dict[str, Sequence[str]] = dict.fromkeys(_of_machine(merged), HARDWARE)
    wanted |= {path: keys for path, keys in GOES_WITH.items() if merged.get(path)}
    for path, keys in wanted.items():
        where = merged.origin(path) or ""
        if (file := file_of(where)) not in files:
            continue  # the fabric's own
        level = files.index(file)
        change = _change(documents[:level], inherited_at(level), keys)
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


def _change(above: Sequence[Document], below: Document, keys: Sequence[str]) -> str | None:
    """The first change of one of `keys` in `above`, or of the site, that no file in or over it calls harmless."""
    for level, document in enumerate(above):
        if any(other.values.get("same_devices") is True for other in above[: level + 1]):
            continue
        for key in keys:
            if key in document.values and _differs(key, document.values[key], below.get(key)):
                return f"{document.origin(key)} changes {key}"
        if "site" in keys and (other := other_site(document.values.get("description"), below.get("site"))):
            return f"{document.origin('description')} describes machines of {other}"
    return None


def other_site(description: object, site: str | None) -> str | None:
    """The site that a description names instead of `site`; None if it names none, or `site` too."""
    if site is None or not isinstance(description, str):
        return None
    named = [name for name, words in SITES.items() if re.search(rf"\b({words})\b", description)]
    return None if site in named else next(iter(named), None)


def _differs(key: str, value: Any, inherited: Any) -> bool:
    if isinstance(value, dict) and isinstance(inherited, dict):
        return any(inherited.get(key) != item for key, item in value.items())
    if key == "gpu_memory_gib" and isinstance(value, int | float) and isinstance(inherited, int | float):
        return abs(value - inherited) > _SAME_MEMORY * inherited
    return inherited is not None and value != inherited


def missing_fabric(node_type: NodeType, variables: Mapping[str, str]) -> Iterator[Problem]:
    """Yields a problem if the network of nodes is unknown, although facts or `variables` show RDMA."""
    if node_type.fabric is not None or node_type.device != "cuda":
        return
    signs = [f"nics_per_node is {node_type.nics_per_node}"] if node_type.nics_per_node else []
    signs += [f"{name} is {value}" for name, value in variables.items() if _shows_rdma(name, value)]
    if signs:
        reason = f"has no fabric, but {few(signs, 3)}. {WITHOUT_FABRIC}"
        yield Problem("node_type", reason, NAME_FABRIC, "cluster")


WITHOUT_FABRIC = "Containers would see no RDMA device, and node checks would look for no NIC"
NAME_FABRIC = f"set fabric in the node type to {one_of(get_args(FabricName))}"


def _shows_rdma(name: str, value: str) -> bool:
    """True for a variable that has an effect with RDMA alone."""
    if name in ("NCCL_NET", "MELLANOX_VISIBLE_DEVICES"):
        return value.casefold() not in ("", "socket", "void", "none")
    if name == "UCX_NET_DEVICES":
        return names_rdma_device(value)
    return any(fnmatchcase(name, pattern) for pattern in load_fabric("ethernet").must_not_set)


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
        exclusion = exclusion_of(name, node_type)
        if exclusion is not None:
            yield (
                name,
                f"must not be set with fabric {node_type.fabric}: {exclusion.why} [{exclusion.source}]",
            )
        elif reason := _other_network(name, value, node_type) or _without_nvlink(name, value, node_type):
            yield name, f"is {value}, {reason}"


def exclusion_of(name: str, node_type: NodeType) -> Exclusion | None:
    """Why the nodes' network excludes a variable; None if it does not."""
    return next(
        (each for pattern, each in node_type.must_not_set.items() if fnmatchcase(name, pattern)), None
    )


def _without_nvlink(name: str, value: str, node_type: NodeType) -> str | None:
    """Why a variable keeps NCCL from using NVLink between nodes."""
    domain = node_type.nvlink.domain_nodes if node_type.nvlink else 1
    if name not in ("NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE") or value != "0" or domain == 1:
        return None
    return f"so NCCL does not use NVLink between nodes, but nvlink.domain_nodes of the nodes is {domain}"


def _other_network(name: str, value: str, node_type: NodeType) -> str | None:
    """Why the value of NCCL_NET or NCCL_NET_PLUGIN does not lead to the fabric."""
    fabric = fabric_of(node_type)
    if fabric is None or name not in ("NCCL_NET", "NCCL_NET_PLUGIN"):
        return None
    usual = fabric.environment.get("NCCL_NET")
    network, value = usual.value if usual else "", value.casefold()
    if name == "NCCL_NET_PLUGIN":
        if value == "none" and (network or fabric.environment_script):
            return f"but NCCL reaches fabric {node_type.fabric} with a plugin"
        if "ofi" in value and network != LIBFABRIC:
            return f"the plugin for libfabric, but NCCL reaches fabric {node_type.fabric} without it"
        return None
    if network and value != network.casefold():
        return f"but NCCL reaches fabric {node_type.fabric} with {network}"
    if value == "socket" and fabric.own_network != "Socket":
        return f"so NCCL uses TCP and not fabric {node_type.fabric}"
    if not network and (owners := _networks().get(value)) and node_type.fabric not in owners:
        return f"the network of {one_of(owners)}, but the nodes have fabric {node_type.fabric}"
    return None


LIBFABRIC = "AWS Libfabric"


@functools.cache
def _networks() -> Mapping[str, tuple[str, ...]]:
    """Value of NCCL_NET in lower case -> fabrics that NCCL reaches with it."""
    found: dict[str, tuple[str, ...]] = {}
    for name in get_args(FabricName):
        fabric = load_fabric(name)
        usual = fabric.environment.get("NCCL_NET")
        network = usual.value if usual else fabric.own_network
        if network and network != "Socket":  # sockets work with every fabric, and slowly
            found[network.casefold()] = (*found.get(network.casefold(), ()), name)
    return found
