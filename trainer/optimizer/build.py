"""Builds the optimizer of a run, with its parameter groups and its loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import megatron.core.optimizer as core_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config

from trainer.contract.config import OptimizerConfig, TrainerConfig
from trainer.contract.optimizers import optimizer_of
from trainer.contract.optimizers.adamw import ADAMW
from trainer.contract.optimizers.kind import Optimizer
from trainer.optimizer import adamw, parameter_groups


class Parts(Protocol):
    """Functions and constants of a module of an optimizer."""

    GROUP_KEYS: tuple[str, ...]
    """Values of Core's parameter groups that are hyperparameters of this optimizer."""

    def core_arguments(self, section: OptimizerConfig) -> dict[str, Any]:
        """The arguments of Core's configuration that only this optimizer uses."""

    def build(self, *arguments: Any, **keywords: Any) -> MegatronOptimizer:
        """The optimizer, from the arguments of Core's get_megatron_optimizer."""


PARTS: dict[Optimizer, Parts] = {ADAMW: adamw}


def parts_of(section: OptimizerConfig) -> Parts:
    """The module for the section `optimizer`."""
    return PARTS[optimizer_of(section)]


def build_optimizer(config: TrainerConfig, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Build the optimizer for this rank's chunks.

    Raises:
        ConfigError: on all ranks, if a parameter group matches no parameter.
    """
    optimizer = parts_of(config.optimizer).build(
        core_config(config),
        model,
        config_overrides=parameter_groups.overrides(config.optimizer.parameter_groups, model),
        use_gloo_process_groups=False,
    )
    if config.training.precision == "fp16":
        _share_loss_scale(optimizers_of(optimizer))
        _scale_loss(get_model_config(model[0]), optimizer, tokens_per_micro_batch(config))
    return optimizer


def optimizers_of(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """The optimizers in `optimizer`: one, and with expert parallelism a second one for the experts.

    Core also has empty ones, such as that of the other parameters if only experts are trained.
    """
    parts = getattr(optimizer, "chained_optimizers", (optimizer,))
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def core_config(config: TrainerConfig) -> core_optimizer.OptimizerConfig:
    """Megatron-Core's configuration for the optimizer."""
    optimizer, precision = config.optimizer, config.training.precision
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return core_optimizer.OptimizerConfig(
        **parts_of(optimizer).core_arguments(optimizer),
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        fp8_recipe=config.training.fp8_recipe if config.training.fp8 else None,
        params_dtype=dtypes[precision],
        # Core would also scale the loss in other precisions, which do not need it.
        loss_scale=optimizer.loss_scale if precision == "fp16" else None,
        initial_loss_scale=optimizer.initial_loss_scale,
        min_loss_scale=optimizer.min_loss_scale,
        loss_scale_window=optimizer.loss_scale_window,
        hysteresis=optimizer.hysteresis,
        use_distributed_optimizer=optimizer_of(optimizer).sharding == "distributed",
        overlap_param_gather=config.parallelism.overlap_param_gather,
    )


def _share_loss_scale(optimizers: Sequence[MegatronOptimizer]) -> None:
    """Give all `optimizers` one loss scale, which follows the overflows of all of them.

    Core gives each optimizer a scale that only follows its own overflows, but scales the loss by the first scale. Once
    the scales differ, the gradients of experts would be too large or too small.
    """
    scaler = optimizers[0].grad_scaler
    update = scaler.update
    overflowed: list[bool] = []

    def update_once(found_inf: bool) -> None:
        overflowed.append(found_inf)
        if len(overflowed) == len(optimizers):  # all have divided by the scale
            update(any(overflowed))
            overflowed.clear()

    scaler.update = update_once
    for each in optimizers:
        each.grad_scaler = scaler


def _scale_loss(core: ModelParallelConfig, optimizer: MegatronOptimizer, tokens: int) -> None:
    """Apply the loss scale to the mean loss of a microbatch, as Megatron-LM does.

    The schedule differentiates sums over tokens, whose fp16 gradients would overflow at a scale of 1. So the sums are
    divided by the number of `tokens` of a full microbatch. `trainer.optimizer.gradients.divisor` compensates for that.
    """
    core.grad_scale_func = lambda loss: optimizer.scale_loss(loss) / tokens


def tokens_per_micro_batch(config: TrainerConfig) -> int:
    """Number of tokens of a full microbatch on one context-parallel rank."""
    tokens = config.training.micro_batch_size * config.model.seq_length
    return tokens // config.parallelism.context_parallel_size
