"""Thresholds of node checks: properties of a host, and the bandwidth of an all-reduce."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from hpcgen.config.fabric import Fabric, fabric_of
from hpcgen.config.loader import Run
from hpcgen.config.node_type import Health, NodeType
from hpcgen.config.run import RunConfig
from hpcgen.planning.allocation import Allocation
from trainer.contract.health import Threshold

EXCLUDED_S = 24 * 3600
"""Seconds for which a bad node is excluded. After that, the name may belong to a replacement virtual machine."""
SCRATCH_GIB = 10
"""Free space needed on the node-local disk for caches, temporary files and starting a container."""
MESSAGE_BYTES = {"cuda": 4 * 2**30, "cpu": 4 * 2**20}
"""Message size to check if no threshold names one, large enough to make latency negligible."""


def node_check(run: Run) -> dict[str, object]:
    """Settings for templates/lib/node-check.sh."""
    expectations = [*_expectations(run.node_type), f"scratch={SCRATCH_GIB}:{run.cluster.scratch}"]
    return {
        "node_expectations": expectations,
        "health_command": run.cluster.health_command,
        "excluded_s": EXCLUDED_S,
    }


def preflight(run: Run, config: RunConfig, allocation: Allocation) -> dict[str, object]:
    """Settings for the check that excludes bad nodes before each attempt; none if the run file does not ask for it."""
    if not config.preflight.node_health and config.preflight.spare_nodes == 0:
        return {}
    return {
        "max_exclusions": config.preflight.max_exclusions,
        **node_check(run),
        "num_job_nodes": allocation.num_job_nodes,
        **({"nodes_per_segment": allocation.nodes_per_segment} if allocation.num_segments > 1 else {}),
    }


def thresholds(node_type: NodeType) -> tuple[Threshold, ...]:
    """The thresholds in order. The first matching one applies."""
    return tuple(
        Threshold(**{field.name: getattr(each, field.name) for field in dataclasses.fields(Threshold)})
        for each in (node_type.health.all_reduce if node_type.health else ())
    )


def message_bytes(node_type: NodeType) -> int:
    """The message size of the thresholds in bytes."""
    sizes = [each.message_gib for each in (node_type.health.all_reduce if node_type.health else ())]
    return int(max(sizes) * 2**30) if sizes else MESSAGE_BYTES[node_type.device]


def rdma_devices(node_type: NodeType) -> tuple[str, ...]:
    """Names of the NICs that the kernel lists as RDMA devices."""
    fabric = fabric_of(node_type)
    is_rdma = fabric is not None and fabric.device_class == "infiniband"
    return tuple(nic.name for nic in node_type.nics) if is_rdma else ()


def _expectations(node_type: NodeType) -> Iterator[str]:
    """Yields NAME=VALUE for each fact of the node type that can be checked on the host."""
    if node_type.device == "cuda":
        yield f"gpus={node_type.gpus_per_node}"
    if fabric := fabric_of(node_type):
        yield from _nics(node_type, fabric)
        if fabric.memlock:
            yield "memlock=unlimited"
    if node_type.health is not None:
        yield from _sizes(node_type.health)


def _nics(node_type: NodeType, fabric: Fabric) -> Iterator[str]:
    """Yields an expectation for each NIC, or one for their number if the node type does not name them."""
    for nic in node_type.nics:
        if fabric.has_rate:
            yield f"nic={nic.name}:{nic.rate_gbit_s:.0f}"
        else:
            yield f"device={fabric.device_class}/{nic.name}"
    if node_type.nics_per_node and not node_type.nics:
        yield f"devices={fabric.device_class}/{fabric.driver or '*'}:{node_type.nics_per_node}"


def _sizes(health: Health) -> Iterator[str]:
    if health.memory_mb is not None:
        least, most = (health.memory_mb * (1 + sign * health.memory_tolerance) for sign in (-1, 1))
        yield f"memory_mb={least:.0f}-{most:.0f}"
    if health.nvme_disks is not None:
        yield f"nvme={health.nvme_disks}"
