"""Custom learning-rate schedule: cosine decay with restarts at the peak (SGDR, arXiv 1608.03983).

optimizer: {lr_schedule: cosine_restarts.py:rate}
"""

from __future__ import annotations

import math

from trainer.contract.config import OptimizerConfig

CYCLES = 4


def rate(iteration: int, optimizer: OptimizerConfig) -> float:
    """Four cosine decays from lr to min_lr, between the warm-up (which the trainer handles) and lr_decay_iters."""
    length = (optimizer.lr_decay_iters - optimizer.lr_warmup_iters) / CYCLES
    done = (iteration - optimizer.lr_warmup_iters) / length
    if done >= CYCLES:
        return optimizer.min_lr
    coefficient = 0.5 * (1 + math.cos(math.pi * (done % 1)))
    return optimizer.min_lr + coefficient * (optimizer.lr - optimizer.min_lr)
