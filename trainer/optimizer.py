"""AdamW through Megatron's distributed optimizer, and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import megatron.core.optimizer as core_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from trainer.config import TrainerConfig


def build_optimizer(config: TrainerConfig, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    """The distributed optimizer over this rank's chunks; at DP = 1 too: checkpoints are of one kind."""
    if core_optimizer.USING_PYTORCH_OPTIMIZER:  # neither Transformer Engine nor apex is there
        _stand_in_for_fused_adam()
    optimizer = config.optimizer
    return get_megatron_optimizer(
        core_optimizer.OptimizerConfig(
            optimizer="adam",
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.adam_beta1,
            adam_beta2=optimizer.adam_beta2,
            adam_eps=optimizer.adam_eps,
            # An infinite limit clips nothing, and Core still computes the norm.
            clip_grad=optimizer.clip_grad or math.inf,
            bf16=config.training.precision == "bf16",
            params_dtype=torch.bfloat16 if config.training.precision == "bf16" else torch.float32,
            use_distributed_optimizer=True,
            overlap_param_gather=config.parallelism.overlap_param_gather,
        ),
        model,
        use_gloo_process_groups=False,
    )


def _stand_in_for_fused_adam() -> None:
    core_optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    core_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


def build_scheduler(config: TrainerConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The learning rate over optimizer steps: linear warm-up from 0, then the decay to min_lr."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.optimizer.lr,
        min_lr=config.optimizer.min_lr,
        lr_warmup_steps=config.optimizer.lr_warmup_iters,
        lr_decay_steps=config.optimizer.lr_decay_iters,
        lr_decay_style=config.optimizer.lr_decay_style,
        start_wd=config.optimizer.weight_decay,
        end_wd=config.optimizer.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the state layout of Transformer Engine's FusedAdam, for where that is not installed.

    Core's distributed optimizer saves and loads this layout (the step in the group, exp_avg and exp_avg_sq in
    the state) and cannot load that of torch.optim.AdamW.
    """

    def __init__(self, params: Any, lr: float, weight_decay: float, betas: Any, eps: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        """One update, decoupled weight decay first (arXiv 1711.05101)."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["exp_avg"], state["exp_avg_sq"] = (
                    torch.zeros_like(parameter),
                    torch.zeros_like(parameter),
                )
        gradients = [p.grad for p in parameters]
        averages = [self.state[p]["exp_avg"] for p in parameters]
        squares = [self.state[p]["exp_avg_sq"] for p in parameters]
        (beta1, beta2), lr, step = group["betas"], group["lr"], group["step"]
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(averages, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, math.sqrt(1 - beta2**step))
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(parameters, averages, denominators, -lr / (1 - beta1**step))
