"""Settings for node checks and spare nodes of the stages train and run."""

from __future__ import annotations

from trainer.contract.config import NonNegative
from trainer.contract.config.section import config_section


@config_section
class PreflightConfig:
    """Node checks before training, and spare nodes."""

    node_health: bool = False
    """Check every node before training. A bad node is replaced by a spare. Without a spare, the job is requeued
    with the node excluded."""
    max_exclusions: NonNegative = 3
    """Maximum number of times the job requeues itself because of bad nodes."""
    spare_nodes: NonNegative = 0
    """Extra nodes to allocate beyond slurm.train.nodes or slurm.run.nodes. A spare replaces a node that is bad or
    fails. Implies node_health."""
