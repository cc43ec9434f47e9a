"""The loss of a microbatch: the sum to differentiate, and the sums to log.

The main loss is the cross entropy of the next token. Further losses are logged next to it and are not part of it: those
of MTP layers, whose gradients the model itself adds, and those of the main output (`trainer.model.head`). Each is a
pair: a sum over tokens, and their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from trainer.contract.config import TrainerConfig
from trainer.data.loader import MicroBatch
from trainer.model import head, multi_token


class Objective:
    """What the steps of a run minimize, and the losses that they log."""

    def __init__(self, config: TrainerConfig, model: Sequence[torch.nn.Module]) -> None:
        """`model` has the wrapped chunks of this rank. The chunk that computes the loss gets a head if it needs one."""
        self.names = (*multi_token.names(config.model), *head.names(config.training))
        """Columns of metrics.jsonl for further losses, in the order of their sums."""
        self._head: head.Head | None = None
        last = unwrap_model(model[-1])
        if head.is_needed(config.training) and last.post_process:
            self._head = head.Head(last, config.training)

    def begin(self, chunk: torch.nn.Module, batch: MicroBatch) -> dict[str, Any]:
        """Begin the forward pass of `chunk` on `batch`. Returns further arguments of it."""
        if self._head is not None:
            self._head.batch = batch
        return multi_token.arguments(chunk, batch)

    def of_microbatch(
        self, token_losses: torch.Tensor, batch: MicroBatch, chunk: torch.nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[b, s] -> the sum to differentiate, its number of tokens, and the sums of all losses for the log.

        The sum is not scaled. The schedule divides it by the tokens of the global batch, and handles context
        parallelism.
        """
        total, tokens = (token_losses.float() * batch.loss_mask).sum(), batch.loss_mask.sum()
        of_head = () if self._head is None else self._head.sums
        loss = total.detach() if self._head is None else self._head.loss_sum
        return total, tokens.int(), torch.stack([loss, tokens, *multi_token.sums(chunk), *of_head])
