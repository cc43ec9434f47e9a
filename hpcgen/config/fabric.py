"""A fabric: what is true of one kind of network between nodes, in a file of topologies/fabrics."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from hpcgen.config import document as documents
from hpcgen.config.container import AnnotationName, AnnotationValue, MountPath
from hpcgen.config.document import Document
from hpcgen.config.fields import EnvironmentName, Text
from hpcgen.config.node_type import Exclusion, NodeType, Variable, VariablePattern
from hpcgen.config.validation import build, located
from hpcgen.errors import ConfigErrors
from hpcgen.resources import shipped
from trainer.contract.config import PositiveFloat
from trainer.contract.record import config_section

FOLDER = "fabrics"
"""The folder of fabrics in topologies/."""

PciClass = Annotated[str, Text(r"0x[0-9a-f]{4}", 'a PCI class such as "0x0207"')]


@config_section
class Fabric:
    """A kind of network between nodes. Fields that a node type has too are its lowest layer."""

    title: str
    """Name of the network, for display."""
    device_class: Literal["infiniband", "cxi", "net"]
    """Folder of /sys/class with the NICs."""
    driver: str | None = None
    """Kernel driver of the NICs, to count them; null for any."""
    pci_class: PciClass
    """PCI class and subclass of the NICs."""
    nic_names: tuple[str, ...]
    """Patterns of the NICs' names."""
    rates_gbit_s: tuple[PositiveFloat, ...]
    """Line rates of the ports of such NICs in Gb/s."""
    has_rate: bool
    """The kernel reports the line rate of a NIC."""
    own_network: Literal["IB", "Socket"] | None = None
    """The network of NCCL itself (a value of NCCL_NET) that reaches the fabric; null if a plugin does."""
    memlock: bool
    """Needs unlimited pinned memory (ulimit -l)."""
    mellanox_hook: bool
    """Containers get the NICs from enroot's hook for NVIDIA's adapters."""
    environment: dict[EnvironmentName, Variable] = field(default_factory=dict)
    """See `NodeType.environment`."""
    environment_script: MountPath | None = None
    """See `NodeType.environment_script`."""
    must_not_set: dict[VariablePattern, Exclusion] = field(default_factory=dict)
    """See `NodeType.must_not_set`."""
    annotations: dict[AnnotationName, AnnotationValue] = field(default_factory=dict)
    """Annotations of containers that runtime ce starts on GPU nodes."""
    library_path: tuple[MountPath, ...] = ()
    """See `NodeType.library_path`."""
    mounts: tuple[MountPath, ...] = ()
    """See `NodeType.mounts`."""
    sources: dict[str, str]
    """Source of each fact, by its key in this file."""

    def names(self, nic: str) -> bool:
        """True if the fabric's NICs have such names."""
        return any(fnmatchcase(nic, pattern) for pattern in self.nic_names)


def load_fabric(name: str) -> Fabric:
    """The fabric `name`, which is shipped with hpcgen."""
    return _load(shipped(f"topologies/{FOLDER}") / f"{name}.yaml")


@functools.cache
def _load(path: Path) -> Fabric:
    document = _read(path)
    fabric, problems = build(Fabric, document)
    if fabric is None:
        raise ConfigErrors(located(problem, document) for problem in problems)
    return fabric


def fabric_of(node_type: NodeType) -> Fabric | None:
    """The fabric of a node type; None if it names none."""
    return load_fabric(node_type.fabric) if node_type.fabric else None


def needs_memlock(node_type: NodeType) -> bool:
    """True if the network of the nodes needs unlimited pinned memory, or is unknown."""
    fabric = fabric_of(node_type)
    return fabric is None or fabric.memlock


def lowest_layer(name: str) -> Document:
    """The facts that a node type inherits from its fabric, with their sources."""
    path = shipped("topologies") / FOLDER / f"{name}.yaml"
    if not path.exists():  # as of a release that had no fabrics
        return Document({}, {"": ""})
    document, shared = _read(path), _field_names(Fabric) & _field_names(NodeType)
    own = [key for key in document.values if key not in shared]
    for key in (*own, *(f"sources.{key}" for key in own if key in document.values["sources"])):
        document = documents.without(document, key)
    return document


def _field_names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


@functools.cache
def _read(path: Path) -> Document:
    return documents.read(path)
