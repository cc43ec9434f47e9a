"""Builds AdamW as Megatron-Core's distributed optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import megatron.core.optimizer as core_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer, get_megatron_optimizer
from megatron.core.utils import get_model_config

from trainer.contract.config import TrainerConfig
from trainer.optimizer import parameter_groups


def build_optimizer(config: TrainerConfig, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Build the distributed optimizer for this rank's chunks, also at DP = 1, so that checkpoints have one format.

    Raises:
        ConfigError: on all ranks, if a parameter group matches no parameter.
    """
    if core_optimizer.USING_PYTORCH_OPTIMIZER:  # neither Transformer Engine nor apex is installed
        _stand_in_for_fused_adam()
    optimizer = get_megatron_optimizer(
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
    """The optimizers in `optimizer`: one, and with expert parallelism a second one for the experts."""
    return getattr(optimizer, "chained_optimizers", (optimizer,))


def core_config(config: TrainerConfig) -> core_optimizer.OptimizerConfig:
    """Megatron-Core's configuration for the optimizer."""
    optimizer, precision = config.optimizer, config.training.precision
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return core_optimizer.OptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
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
        use_distributed_optimizer=True,
        overlap_param_gather=config.parallelism.overlap_param_gather,
    )


def _share_loss_scale(optimizers: Sequence[MegatronOptimizer]) -> None:
    """Give all `optimizers` one loss scale, which follows the overflows of all of them.

    Core gives each a scale that only follows its own overflows, but scales the loss by that of the first. Once they
    differ, the gradients of experts would be too large or too small.
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


def _stand_in_for_fused_adam() -> None:
    core_optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    core_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


class FusedAdam(torch.optim.Optimizer):
    """torch's fused AdamW with the state layout of Transformer Engine's, which it replaces if that is not installed.

    Core's distributed optimizer saves and loads this layout (the step in the group, exp_avg and exp_avg_sq in the
    state), and cannot load the layout of torch.optim.AdamW.
    """

    def __init__(self, params: Any, lr: float, weight_decay: float, betas: Any, eps: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters, with decoupled weight decay first (arXiv 1711.05101)."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            if not (state := self.state[parameter]):
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        (beta1, beta2), device = group["betas"], parameters[0].device
        torch._fused_adamw_(
            parameters,
            [parameter.grad for parameter in parameters],
            [self.state[parameter]["exp_avg"] for parameter in parameters],
            [self.state[parameter]["exp_avg_sq"] for parameter in parameters],
            [],
            [torch.full((), float(group["step"]), device=device)] * len(parameters),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
