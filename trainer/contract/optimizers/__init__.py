"""The optimizers. To add one, add its module, its object in OPTIMIZERS, and the key that chooses it."""

from __future__ import annotations

from trainer.contract.config import OptimizerConfig
from trainer.contract.optimizers.adamw import ADAMW
from trainer.contract.optimizers.kind import Optimizer

OPTIMIZERS: tuple[Optimizer, ...] = (ADAMW,)


def optimizer_of(section: OptimizerConfig) -> Optimizer:
    """The optimizer of the section `optimizer`. AdamW is the only one, so no key chooses it."""
    return ADAMW
