"""Logits that tensor-parallel ranks share, each with a part of the vocabulary.

Every rank of the tensor-parallel group must call these functions with the same labels, and must compute the same loss
from the results. The gradient of a result is then that of its input, on each rank for its own part.
Shapes: w is the width of a rank's part of the vocabulary, and the leading dimensions are those of the caller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup


class _LabelLogits(torch.autograd.Function):
    """Passes logits through, and takes the one of each label."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = logits.size(-1)
        own = labels - group.rank() * width
        is_own = (own >= 0) & (own < width)
        own = own.where(is_own, 0)
        found = logits.gather(-1, own.unsqueeze(-1)).squeeze(-1).float() * is_own
        if group.size() > 1:
            torch.distributed.all_reduce(found, group=group)
        ctx.save_for_backward(own, is_own)
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


def with_label_logits(
    logits: torch.Tensor, labels: torch.Tensor, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `logits` [..., w], and the logit of each of the `labels` [...] in fp32.

    The only use of the returned logits must be one cross entropy, whose gradients the backward pass changes in place.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _LabelLogits.apply(logits, labels, group)
    return found
