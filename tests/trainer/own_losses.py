"""Losses and metrics of a user, for tests that name them by their import path."""

from __future__ import annotations

import torch
from torch.nn import functional

from trainer.contract.config import TrainerConfig
from trainer.data.microbatch import MicroBatch
from trainer.model import vocab_parallel

SMOOTHING = 0.1


def plain(
    logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, batch: MicroBatch
) -> torch.Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


class Smoothed:
    """Label smoothing, and what it consists of."""

    terms = ("likelihood", "uniform")

    def __init__(self, config: TrainerConfig) -> None:
        self.length = config.model.seq_length

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert batch.labels is labels
        assert self.length % labels.size(1) == 0
        logs = logits.log_softmax(-1)
        likelihood = -logs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        uniform = -logs.mean(-1)
        losses = (1 - SMOOTHING) * likelihood + SMOOTHING * uniform
        return losses, {"likelihood": likelihood, "uniform": uniform}


def low_labels(
    logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, batch: MicroBatch
) -> tuple[torch.Tensor, float]:
    """The mean probability of a low label, from parts of the vocabulary."""
    is_low = (labels < 250) * loss_mask
    probabilities = torch.exp(-vocab_parallel.cross_entropy(logits, labels))
    return (probabilities * is_low).sum(), float(is_low.sum())


low_labels.vocab_parallel = True  # type: ignore[attr-defined]


def wrong_shape(
    logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, batch: MicroBatch
) -> torch.Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), labels)


def detached(
    logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, batch: MicroBatch
) -> torch.Tensor:
    return plain(logits.detach(), labels, loss_mask, batch)


def forgets_its_terms(
    logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, batch: MicroBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    losses = plain(logits, labels, loss_mask, batch)
    return losses, {"kl": losses}


def not_a_number(
    logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, batch: MicroBatch
) -> torch.Tensor:
    return plain(logits, labels, loss_mask, batch) * float("nan")


def two_arguments(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits


class NoCall:
    def __init__(self, config: TrainerConfig) -> None: ...
