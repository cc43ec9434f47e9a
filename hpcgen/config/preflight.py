"""What a training job does about bad nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from trainer.contract.config import FORBID_UNKNOWN_KEYS, NonNegative


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """Checks of the nodes before training starts on them, and nodes in reserve."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    node_health: bool = False
    """Checks every node first; a bad one is replaced by a spare, or excluded and the job requeued."""
    max_exclusions: NonNegative = 3
    """Times the job may put itself back into the queue because of bad nodes."""
    spare_nodes: NonNegative = 0
    """Nodes asked for beyond slurm.train.nodes, which take over when one is bad or dies; implies node_health."""
