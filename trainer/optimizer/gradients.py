"""The gradients of a step: sums over the tokens of the global batch until the update divides them.

Core would divide them when the backward pass ends. This takes one more pass over the whole gradient buffer, and Core
0.16 first waits for the GPU to count the tokens. Here, one pass over this rank's shard divides and clips.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.optimizer import MegatronOptimizer

from trainer.contract.config import TrainerConfig
from trainer.optimizer.build import optimizers_of, tokens_per_micro_batch


def norm(optimizer: MegatronOptimizer, like: torch.Tensor) -> torch.Tensor:
    """The norm of the gradients of all ranks as a tensor of shape [1], with the type and the device of `like`.

    megatron-core 0.16 returns a number; since 0.17 it is a tensor on the GPU.
    """
    return torch.as_tensor(optimizer.get_grad_norm(), dtype=like.dtype, device=like.device).reshape(1)


def of_the_norm(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """This rank's part of the gradients that the norm is of. megatron-core 0.19 renamed the method."""
    names = ("get_grads_for_grad_norm", "get_main_grads_for_grad_norm")
    for part in optimizers_of(optimizer):
        yield from next(getattr(part, name) for name in names if hasattr(part, name))()


def divisor(tokens: float, config: TrainerConfig) -> float:
    """Number by which the gradients of a step with `tokens` tokens are too large.

    With fp16, the loss is already divided by the tokens of a full microbatch (`trainer.optimizer.build`).
    """
    per_loss = tokens_per_micro_batch(config) if config.training.precision == "fp16" else 1
    return max(tokens, 1) / per_loss


@torch.no_grad()
def update(optimizer: MegatronOptimizer, divisor: float, clip_grad: float, grad_norm: float) -> None:
    """Divide the gradients by `divisor`, clip them to the norm `clip_grad` if that is not 0, and update the weights.

    The part of Core's `optimizer.step` that follows once the gradients are ready and `grad_norm`, their norm after the
    division, is known.
    """
    factor = 1 / divisor
    if clip_grad > 0:
        factor *= min(1, clip_grad / (grad_norm + 1e-6))  # as in clip_grads.py, clip_grad_by_total_norm_fp32
    for part in optimizers_of(optimizer):
        # With few parameters and many ranks, a rank may have none.
        if gradients := [each.grad for each in part.get_parameters() if each.grad is not None]:
            torch._foreach_mul_(gradients, factor)
    optimizer.step_with_ready_grads()
