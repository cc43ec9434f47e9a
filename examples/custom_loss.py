"""Custom losses and a metric: the focal loss (arXiv 1708.02002), label smoothing, and the accuracy of the next token.

training: {loss: custom_loss.py:focal, metrics: [custom_loss.py:accuracy]}
"""

from __future__ import annotations

import torch
from torch.nn import functional

from trainer.data.microbatch import MicroBatch
from trainer.model import vocab_parallel

GAMMA = 2.0
SMOOTHING = 0.1


def focal(
    logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, batch: MicroBatch
) -> torch.Tensor:
    """The cross entropy, with less weight for tokens that the model predicts well: (1 - p) ** GAMMA."""
    losses = vocab_parallel.cross_entropy(logits, labels)
    return (1 - torch.exp(-losses)) ** GAMMA * losses


focal.vocab_parallel = True  # type: ignore[attr-defined]  # each tensor-parallel rank gets its part of the logits


def smoothed(
    logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, batch: MicroBatch
) -> torch.Tensor:
    """The cross entropy with label smoothing, from complete logits."""
    return functional.cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", label_smoothing=SMOOTHING
    )


def accuracy(
    logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, batch: MicroBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """The share of tokens whose label has the largest logit."""
    is_right = (logits.argmax(-1) == labels) * loss_mask
    return is_right.sum(), loss_mask.sum()
