"""One microbatch of a rank.

Shapes: b microbatch, s tokens of the sequence on this context-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MicroBatch:
    """One microbatch. The tensors [b, s] are on this rank's device."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    boundaries: torch.Tensor | None
    """Boundaries of the documents of the complete samples (`trainer.data.documents`), on the CPU. None if tokens attend
    across documents."""
    padding: tuple[int, ...] | None = None
    """Number of tokens at the end of each complete sample that belong to no chat. None if all tokens are of
    documents."""
