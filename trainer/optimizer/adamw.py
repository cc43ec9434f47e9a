"""AdamW as Megatron-Core's distributed optimizer."""

from __future__ import annotations

from typing import Any

import megatron.core.optimizer as core_optimizer
import torch
from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer, get_megatron_optimizer

from trainer.contract.config import OptimizerConfig
from trainer.contract.optimizers.adamw import ADAMW

GROUP_KEYS: tuple[str, ...] = ("betas", "eps")
"""Values of Core's parameter groups that are hyperparameters of AdamW."""


def core_arguments(section: OptimizerConfig) -> dict[str, Any]:
    """The arguments of Core's configuration that only AdamW uses."""
    return {"optimizer": "adam", **{key: getattr(section, key) for key in ADAMW.keys}}


def build(*arguments: Any, **keywords: Any) -> MegatronOptimizer:
    """Core's distributed optimizer, also at DP = 1, so that checkpoints have one format."""
    if core_optimizer.USING_PYTORCH_OPTIMIZER:  # neither Transformer Engine nor apex is installed
        _stand_in_for_fused_adam()
    return get_megatron_optimizer(*arguments, **keywords)


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
