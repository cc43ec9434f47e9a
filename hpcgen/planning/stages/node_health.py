"""The node-health stage: every node of the job checked, on the host and with its GPUs."""

from __future__ import annotations

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.stages.config_text import config_text
from hpcgen.planning.stages.node_check import node_check
from hpcgen.planning.stages.thresholds import message_bytes, thresholds
from hpcgen.planning.stages.work import Work
from trainer.contract.health import NodeHealthConfig


def work(run: Run, config: RunConfig, allocation: Allocation) -> Work:
    """What the stage runs: the host's check, then trainer.health.node."""
    node_type = run.node_type
    health = node_type.health
    check = NodeHealthConfig(
        device=node_type.device,
        ranks_per_node=allocation.ntasks_per_node,
        gpus_per_node=node_type.gpus_per_node,
        peak_tflops=node_type.peak_tflops.get("bf16") if node_type.device == "cuda" else None,
        host_device_gb_s=health.host_device_gb_s if health else None,
        peer_gb_s=health.peer_gb_s if health else None,
        all_reduce_bytes=message_bytes(node_type),
        thresholds=thresholds(node_type),
    )
    return Work(
        arguments=("-m", "trainer.health.node"),
        files={"node-health.config.json": config_text(check)},
        values=node_check(run),
    )
