"""The stage node-health: checks every node of the job, on the host and with its GPUs."""

from __future__ import annotations

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.config_text import config_text
from hpcgen.planning.kind import Stage, Work
from hpcgen.planning.node_check import message_bytes, node_check, thresholds
from trainer.contract.config import TrainerConfig
from trainer.contract.health import NodeHealthConfig


class NodeHealth(Stage):
    """Runs the check of the host, then trainer.health.node."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """Compares each node with the thresholds of its node type."""
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


STAGES = (NodeHealth.of("node-health"),)
