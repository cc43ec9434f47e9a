"""The loss of a microbatch: the sum to differentiate, and the sums to log.

The main loss is the loss of the next token. A term is a further loss that is logged next to it. The model itself adds
the gradients of a term, so it is not part of the main loss. Each loss is a pair: a sum over tokens, and their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from trainer.contract.config import ModelConfig
from trainer.data.loader import MicroBatch
from trainer.model import multi_token


class Term(Protocol):
    """A further loss, such as the loss of MTP layers. Any module with these functions is a term."""

    def names(self, model: ModelConfig) -> tuple[str, ...]:
        """Columns of metrics.jsonl. Empty if `model` does not have the loss."""

    def sums(self, chunk: torch.nn.Module) -> Sequence[torch.Tensor]:
        """The sum and the number of tokens for each name, from the latest microbatch of the last chunk."""

    def arguments(self, chunk: torch.nn.Module, batch: MicroBatch) -> dict[str, Any]:
        """Further arguments of the forward pass of `chunk`."""


TERMS: tuple[Term, ...] = (multi_token,)


def term_names(model: ModelConfig) -> tuple[str, ...]:
    """Columns of metrics.jsonl of all further losses, in the order of their sums."""
    return tuple(name for term in TERMS for name in term.names(model))


def forward_arguments(chunk: torch.nn.Module, batch: MicroBatch) -> dict[str, Any]:
    """Arguments of the forward pass that the terms need."""
    return {name: value for term in TERMS for name, value in term.arguments(chunk, batch).items()}


def next_token(
    token_losses: torch.Tensor, batch: MicroBatch, chunk: torch.nn.Module
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[b, s] -> the sum to differentiate, its number of tokens, and the sums of all losses for the log.

    The sum is not scaled. The schedule divides it by the tokens of the global batch, and handles context parallelism.
    """
    total, tokens = (token_losses.float() * batch.loss_mask).sum(), batch.loss_mask.sum()
    of_terms = (value for term in TERMS for value in term.sums(chunk))
    return total, tokens.int(), torch.stack([total.detach(), tokens, *of_terms])
