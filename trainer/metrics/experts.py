"""Load of the experts: how many tokens each one processed, relative to an even distribution."""

from __future__ import annotations

from typing import Any

import torch

from trainer.contract.config import TrainerConfig
from trainer.contract.model.experts import expert_tensor_parallel_size
from trainer.model.experts import LOSSES
from trainer.step import StepResult

EVERY_STEPS = 100
"""Steps between two events with the load of each expert, which are long for large models."""

BY_LAYER = "moe_max_load_by_layer"
DIGITS = 4
"""Decimal places of loads."""

LOSS_NAMES = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
"""Megatron-LM's names of the load-balancing losses."""


class ExpertLoad:
    """Statistics of the routers (`trainer.model.experts.take_statistics`) over a number of steps."""

    def __init__(self, config: TrainerConfig) -> None:
        self._model = config.model
        self._seq_length = config.model.seq_length
        self._micro_batch_size = config.training.micro_batch_size
        self._sum: torch.Tensor | float = 0.0
        self._samples = 0

    def add(self, result: StepResult, seconds: float) -> None:
        """Add the global batch of a step."""
        if result.experts is not None:
            self._sum = self._sum + result.experts
            self._samples += result.batch.size

    def values(self) -> dict[str, Any]:
        """Values for a line of metrics.jsonl. Empty for a dense model."""
        if self._model.num_moe_experts is None:
            return {}
        load = self._load()
        values: dict[str, Any] = {
            "moe_max_load": round(float(load.max()), DIGITS),
            "moe_min_load": round(float(load.min()), DIGITS),
            BY_LAYER: _rounded(load.max(1).values),
        }
        if self._model.moe_expert_capacity_factor is not None:
            values["moe_dropped"] = 1 - float(self._tokens().sum()) / (len(load) * self._routed())
        return values | self._losses()

    def by_expert(self) -> list[list[float]]:
        """The load of each expert, by MoE layer."""
        return [_rounded(layer) for layer in self._load()]

    def _load(self) -> torch.Tensor:
        """Tokens of each expert divided by the mean over the experts of its layer, [MoE layers, experts]."""
        tokens = self._tokens()
        return tokens / tokens.mean(1, keepdim=True).clamp(min=1)

    def _tokens(self) -> torch.Tensor:
        return self._statistics()[:, :-LOSSES]

    def _statistics(self) -> torch.Tensor:
        assert isinstance(self._sum, torch.Tensor)
        return self._sum

    def _routed(self) -> int:
        """Number of pairs of a token and an expert in each layer, including dropped ones."""
        return self._samples * self._seq_length * self._model.moe_router_topk

    def _losses(self) -> dict[str, float]:
        """Auxiliary losses without their coefficients: means over the layers and over microbatches or tokens."""
        balancing, z_loss, z_tokens = self._statistics()[:, -LOSSES:].mean(0).tolist()
        values = {}
        if self._model.moe_aux_loss_coeff > 0 and self._model.moe_router_load_balancing_type in LOSS_NAMES:
            name = LOSS_NAMES[self._model.moe_router_load_balancing_type]
            values[name] = balancing * self._micro_batch_size / self._samples
        if self._model.moe_z_loss_coeff is not None:
            values["z_loss"] = z_loss / max(z_tokens, 1)
        return values


def layout(config: TrainerConfig) -> dict[str, int]:
    """Expert-parallel sizes for the event `start`. Empty for a dense model."""
    if config.model.num_moe_experts is None:
        return {}
    parallelism = config.parallelism
    return {"ep": parallelism.expert_model_parallel_size, "etp": expert_tensor_parallel_size(parallelism)}


def _rounded(load: torch.Tensor) -> list[float]:
    return [round(number, DIGITS) for number in load.tolist()]
