"""What the health programs read: dataclasses in JSON, in the manner of `trainer.contract.config`, which hpcgen writes.

Standard library alone: the login node writes these without torch.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from trainer.contract.config import (
    FORBID_UNKNOWN_KEYS,
    ConfigError,
    Count,
    Fraction,
    NonNegative,
    PositiveFloat,
    from_dict,
)


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Bus bandwidth of an all-reduce that a healthy allocation reaches under these conditions."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    min_nodes: Count
    """Smallest allocation it is for."""
    max_nodes: Count | None = None
    """Largest allocation it is for; null means no limit."""
    nvls: bool
    """Whether NCCL may use NVLink SHARP."""
    collnet: bool
    """Whether NCCL may use CollNet (SHARP in the switches); one node has no use for it."""
    expected_gb_s: PositiveFloat | None = None
    """What a healthy allocation shows (GB/s)."""
    warn_below_gb_s: PositiveFloat | None = None
    """Less is worth a look (GB/s); null means that nothing is between good and bad."""
    fail_below_gb_s: PositiveFloat
    """Less means that something is broken (GB/s)."""
    source: str
    """Where the figures come from."""


@dataclass(frozen=True, kw_only=True)
class NcclTestConfig:
    """One test of the fabric: an all-reduce over all ranks, and what its bandwidth is compared with."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    device: Literal["cuda", "cpu"]
    """NCCL between GPUs, or gloo between CPUs."""
    node_type: str
    """Name of the node type, which the baseline is kept by."""
    nodes: Count
    """Nodes of the test."""
    ranks_per_node: Count
    """Ranks of each node: one for each GPU."""
    gpus_per_node: NonNegative = 0
    """GPUs of such a node; thresholds hold only where all of them take part."""
    sizes_bytes: tuple[Count, ...]
    """Messages to measure, smallest first; the last one is judged."""
    iterations: Count = 20
    """All-reduces of each size after the warm-up; fewer where they would take longer than 10 s."""
    thresholds: tuple[Threshold, ...] = ()
    """What the node type is known to reach; the first whose conditions fit holds."""
    baseline: str
    """File with the bandwidths that this cluster is known to reach, for layouts without a threshold."""
    warn_deficit: Fraction = 0.10
    """Part of the baseline that may be missing without a warning."""
    fail_deficit: Fraction = 0.25
    """Part of the baseline that may be missing without a failure; also how far a weak node is below others."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Variables as the node type sets them: other values in a task may explain a low bandwidth."""
    nics: tuple[str, ...] = ()
    """RDMA devices of a node that carry traffic between GPUs."""
    timeout_s: Count = 180
    """A step of the test that takes longer is a hang, and ends it (seconds)."""


@dataclass(frozen=True, kw_only=True)
class NodeHealthConfig:
    """The part of a node's check that needs its GPUs: what each node must reach by itself."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    device: Literal["cuda", "cpu"]
    """What is tested."""
    ranks_per_node: Count
    """Tasks of each node: one for each GPU."""
    peak_tflops: PositiveFloat | None = None
    """Dense bf16 peak of one GPU (TFLOP/s); null compares the GPUs of a node with each other alone."""
    min_peak_fraction: Fraction = 0.6
    """Part of the peak that a large matrix product must reach."""
    max_gpu_deficit: Fraction = 0.15
    """How far one GPU may be below the middle one of its node; 8 % were seen between four sound H200s."""
    host_device_gb_s: PositiveFloat | None = None
    """Least bandwidth between host and one GPU, in each direction (GB/s); null measures and does not judge."""
    peer_gb_s: PositiveFloat | None = None
    """Least bandwidth of copies from one GPU to the next (GB/s); null measures and does not judge."""
    gpus_per_node: NonNegative = 0
    """GPUs of such a node; the all-reduce is judged only where all of them take part."""
    all_reduce_bytes: Count
    """Message of the all-reduce between the node's GPUs."""
    thresholds: tuple[Threshold, ...] = ()
    """Those for one node are compared with."""
    timeout_s: Count = 180
    """A step of the check that takes longer is a hang, and ends it (seconds)."""


T = TypeVar("T")


def read(cls: type[T], path: Path) -> T:
    """Reads the JSON file of a health program.

    Raises:
        ConfigError: the file is missing, is not JSON, or does not fit `cls`.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return from_dict(cls, document, where=str(path))
