"""Configurations of the health programs as dataclasses. hpcgen writes them as JSON, like `trainer.contract.config`."""

from __future__ import annotations

import dataclasses
from typing import Literal

from trainer.contract.config import (
    Count,
    Fraction,
    NonNegative,
    PositiveFloat,
)
from trainer.contract.record import config_section


@config_section
class Threshold:
    """Bus bandwidth that an all-reduce reaches on a healthy allocation under these conditions."""

    min_nodes: Count
    """Minimum number of nodes to which it applies."""
    max_nodes: Count | None = None
    """Maximum number of nodes to which it applies; null for no limit."""
    nvls: bool
    """Applies if NCCL uses NVLink SHARP (true) or not (false)."""
    collnet: bool
    """Applies if NCCL uses CollNet (true) or not (false). CollNet is SHARP in the InfiniBand switches. Ignored for
    nodes that NVLink connects."""
    expected_gb_s: PositiveFloat | None = None
    """Bandwidth of a healthy allocation in GB/s."""
    warn_below_gb_s: PositiveFloat | None = None
    """Bandwidth in GB/s below which there is a warning; null for no warning."""
    fail_below_gb_s: PositiveFloat
    """Bandwidth in GB/s below which a node or link is broken."""
    source: str
    """Source of the figures."""


@config_section
class NcclTestConfig:
    """Fabric test: an all-reduce over all ranks, and the bandwidths it is compared with."""

    device: Literal["cuda", "cpu"]
    """NCCL between GPUs (cuda), or gloo between CPUs (cpu)."""
    node_type: str
    """Name of the node type. The baseline file is keyed by it."""
    nodes: Count
    """Number of nodes in the test."""
    ranks_per_node: Count
    """Number of ranks per node: one per GPU."""
    gpus_per_node: NonNegative = 0
    """Number of GPUs in a node of this type; thresholds apply only if all of them take part."""
    nvlink_nodes: Count = 1
    """Number of nodes whose GPUs are all connected by NVLink."""
    sizes_bytes: tuple[Count, ...]
    """Message sizes to measure, in ascending order. Only the last one is compared with the limits."""
    iterations: Count = 20
    """Number of all-reduces of each size after the warm-up. Fewer are run if they would take longer than 10 s."""
    thresholds: tuple[Threshold, ...] = ()
    """Known bandwidths of the node type; the first with matching conditions applies."""
    baseline: str
    """File with the known bandwidths of this cluster, for layouts without a threshold."""
    warn_deficit: Fraction = 0.10
    """Shortfall from the baseline, as a fraction, above which the test warns."""
    fail_deficit: Fraction = 0.25
    """Relative shortfall from the baseline above which the test fails. A node with this shortfall from the others is
    weak."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Variables as the node type sets them; different values in a task may explain a low bandwidth."""
    nics: tuple[str, ...] = ()
    """RDMA devices of a node that carry traffic between GPUs."""
    timeout_s: Count = 180
    """Timeout of each step of the test (seconds)."""


@config_section
class NodeHealthConfig:
    """GPU part of a node check: the performance that each node must reach by itself."""

    device: Literal["cuda", "cpu"]
    """Device to test."""
    ranks_per_node: Count
    """Number of tasks per node: one per GPU."""
    peak_tflops: PositiveFloat | None = None
    """Dense bf16 peak of one GPU (TFLOP/s); null: the GPUs of a node are only compared with each other."""
    min_peak_fraction: Fraction = 0.6
    """Fraction of the peak that a large matrix product must reach."""
    max_gpu_deficit: Fraction = 0.15
    """Allowed shortfall of a GPU from the median of its node; four healthy H200s differed by up to 8%."""
    host_device_gb_s: PositiveFloat | None = None
    """Minimum bandwidth between host and one GPU, in each direction (GB/s); null: measured, but not judged."""
    peer_gb_s: PositiveFloat | None = None
    """Minimum bandwidth of copies from one GPU to the next (GB/s); null: measured, but not judged."""
    gpus_per_node: NonNegative = 0
    """Number of GPUs in a node of this type; the all-reduce is checked only if all of them take part."""
    all_reduce_bytes: Count
    """Message size of the all-reduce between the node's GPUs (bytes)."""
    thresholds: tuple[Threshold, ...] = ()
    """Known bandwidths of the node type. Only the bandwidths for one node are used."""
    timeout_s: Count = 180
    """Timeout of each step of the check (seconds)."""
