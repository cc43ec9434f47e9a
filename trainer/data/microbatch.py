"""One microbatch of a rank, and the names of what samples have besides tokens, labels and loss_mask.

Shapes: b microbatch, s tokens of the sequence on this context-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

IS_FIRST, PADDING = "is_first", "padding"
"""Fields of samples that consist of complete documents: for each token, whether it begins a document [s]; and the
number of tokens at the end that belong to none []. The padding counts as a document."""

OWN_POSITIONS = "own_positions"
"""Field of the position_ids of samples from data.dataset. Megatron-Core's samples have position_ids that are not
read."""


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
