"""Exponential moving average of the trained weights: average = ema_decay x average + (1 - ema_decay) x weight.

The average is in fp32. Each rank has that of the weights that its optimizer updates, so data-parallel ranks share it.
"""

from __future__ import annotations

import torch
from megatron.core.optimizer import MegatronOptimizer

from trainer.optimizer.build import optimizers_of


class WeightAverage:
    """The averages of this rank's fp32 weights. They begin with the weights themselves."""

    def __init__(self, optimizer: MegatronOptimizer, decay: float) -> None:
        self._decay = decay
        self._weights: list[torch.Tensor] = [
            weight for part in optimizers_of(optimizer) for weight in part.get_parameters()
        ]
        self._averages = [weight.detach().clone() for weight in self._weights]
        self._by_weight = {
            id(weight): average for weight, average in zip(self._weights, self._averages, strict=True)
        }

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The average of one of the optimizer's fp32 weights, in the same shape. Loading fills it in place."""
        return self._by_weight[id(weight)]

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after an update."""
        if self._weights:  # a rank may have none
            torch._foreach_lerp_(
                self._averages, [weight.detach() for weight in self._weights], 1 - self._decay
            )

    @torch.no_grad()
    def restart(self) -> None:
        """Begin with the present weights, for example those of a checkpoint without averages."""
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.copy_(weight)
