"""Functions of logits that tensor-parallel ranks share, each with a part of the vocabulary.

A loss with the attribute `vocab_parallel` gets such a part, and needs these functions for what all parts decide. Every
rank of the tensor-parallel group must call them with the same token IDs, and compute the same loss from the results.
Then each rank has the gradients of its own part, without further communication.
Shapes: w is the width of a rank's part of the vocabulary; dots are any leading dimensions, such as b and s.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from torch.distributed import ProcessGroup, ReduceOp


class _LogZ(torch.autograd.Function):
    """The logarithm of the sum of the exponentials of all logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        largest = logits.amax(-1).float()
        _reduce(largest, group, ReduceOp.MAX)
        total = (logits.float() - largest.unsqueeze(-1)).exp_().sum(-1)
        _reduce(total, group, ReduceOp.SUM)
        log_z = total.log_().add_(largest)
        ctx.save_for_backward(logits, log_z)
        return log_z

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, log_z = ctx.saved_tensors
        probabilities = (logits.float() - log_z.unsqueeze(-1)).exp_()
        return probabilities.mul_(gradients[0].unsqueeze(-1)).to(logits.dtype), None


class _LogitsOf(torch.autograd.Function):
    """The logits of some token IDs."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, ids: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        own, is_own = _own(logits, ids, group)
        ctx.save_for_backward(own, is_own)
        ctx.width, ctx.dtype = logits.size(-1), logits.dtype
        return _take(logits, own, is_own, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        own, is_own = ctx.saved_tensors
        of_logits = torch.zeros((*own.shape[:-1], ctx.width), dtype=ctx.dtype, device=own.device)
        of_logits.scatter_add_(-1, own, (gradients[0] * is_own).to(ctx.dtype))
        return of_logits, None, None


class _LabelLogits(torch.autograd.Function):
    """Passes logits through, and takes the one of each label."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own, is_own = _own(logits, labels.unsqueeze(-1), group)
        found = _take(logits, own, is_own, group).squeeze(-1)
        ctx.save_for_backward(own.squeeze(-1), is_own.squeeze(-1))
        return logits.detach(), found  # not a view, which may not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        of_logits, of_found = gradients
        own, is_own = ctx.saved_tensors
        # In place, since a second gradient of all logits would take as much memory as the first.
        rows = of_logits.view(-1, of_logits.size(-1))
        index = torch.arange(len(rows), device=rows.device), own.flatten()
        rows[index] += (of_found * is_own).flatten().to(rows.dtype)
        return of_logits, None, None


def log_z(logits: torch.Tensor, group: ProcessGroup | None = None) -> torch.Tensor:
    """Logarithm of the sum of the exponentials of the logits [..., w] of all ranks, in fp32 [...].

    `group` has the ranks; by default, the tensor-parallel group.
    """
    found: torch.Tensor = _LogZ.apply(logits, group or parallel_state.get_tensor_model_parallel_group())
    return found


def logits_of(logits: torch.Tensor, ids: torch.Tensor, group: ProcessGroup | None = None) -> torch.Tensor:
    """The logits of the token `ids` [..., k], from the logits [..., w] of all ranks, in fp32 [..., k]."""
    group = group or parallel_state.get_tensor_model_parallel_group()
    found: torch.Tensor = _LogitsOf.apply(logits, ids, group)
    return found


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, group: ProcessGroup | None = None
) -> torch.Tensor:
    """The cross entropy of the `labels` [...] in nats, from the logits [..., w] of all ranks, in fp32 [...]."""
    return log_z(logits, group) - logits_of(logits, labels.unsqueeze(-1), group).squeeze(-1)


def with_label_logits(
    logits: torch.Tensor, labels: torch.Tensor, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `logits` [..., w], and the logit of each of the `labels` [...] in fp32.

    The only use of the returned logits must be one cross entropy, whose gradients the backward pass changes in place.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _LabelLogits.apply(logits, labels, group)
    return found


def _own(logits: torch.Tensor, ids: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of token IDs in this rank's logits, and which of them it has. The columns of others are 0."""
    width = logits.size(-1)
    own = ids - group.rank() * width
    is_own = (own >= 0) & (own < width)
    return own.where(is_own, 0), is_own


def _take(logits: torch.Tensor, own: torch.Tensor, is_own: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The logits in these columns, from the rank that has each."""
    found = logits.gather(-1, own).float() * is_own
    _reduce(found, group, ReduceOp.SUM)
    return found


def _reduce(values: torch.Tensor, group: ProcessGroup, operation: ReduceOp.RedOpType) -> None:
    if group.size() > 1:
        torch.distributed.all_reduce(values, operation, group=group)
