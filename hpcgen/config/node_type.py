"""Facts about a kind of node: a file of topologies/, the same on every cluster that has such nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hpcgen.config.container import MountPath
from hpcgen.config.fields import EnvironmentName, Mask
from trainer.config import FORBID_UNKNOWN_KEYS, Count, NonNegative, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable that jobs on these nodes need."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    value: str
    """The value; null unsets nothing, leave the variable out instead."""
    why: str
    """What it does and why this value, for the person who reads the script."""
    source: str
    """Where the fact comes from."""


@dataclass(frozen=True, kw_only=True)
class NodeType:
    """A kind of node."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    description: str
    """One line for people."""
    device: Literal["cuda", "cpu"]
    """What training computes on."""
    gpus_per_node: NonNegative
    """GPUs of one node; 0 for nodes without."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of one GPU (GiB)."""
    peak_tflops: dict[Literal["bf16", "fp32"], PositiveFloat] = field(default_factory=dict)
    """Dense peak of one device by precision (TFLOP/s); a precision that is absent has no MFU."""
    cpus_per_node: Count | None = None
    """CPUs as Slurm counts them; null when it differs from node to node."""
    cpu_masks: tuple[Mask, ...] = ()
    """CPUs of each local rank when every GPU has one task; empty leaves binding to Slurm."""
    topology_file: MountPath | None = None
    """NCCL's topology XML on the host."""
    exclusive: bool = True
    """A job takes whole nodes."""
    environment: dict[EnvironmentName, Variable] = field(default_factory=dict)
    """Variables of GPU jobs on these nodes."""
