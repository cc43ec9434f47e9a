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
from trainer.data.microbatch import MicroBatch
from trainer.model import experts, multi_token
from trainer.model.head import Head, Wanted


class Objective:
    """The loss that the steps of a run minimize, and the losses and metrics that they log."""

    def __init__(self, config: TrainerConfig, model: Sequence[torch.nn.Module]) -> None:
        """`model` has the wrapped chunks of this rank. The chunk that computes the loss gets a head if it needs one.

        Raises:
            ConfigError: a function of the user cannot be imported, or its arguments are others.
        """
        wanted = Wanted.of(config)
        self.losses = (*multi_token.names(config.model), *wanted.losses)
        """Columns of metrics.jsonl for further losses."""
        self.metrics = wanted.metric_names
        """Columns of metrics.jsonl for metrics of the user."""
        self.names = (*self.losses, *self.metrics)
        """All of these columns, in the order of their sums."""
        self._data = config.data
        self._head: Head | None = None
        last = unwrap_model(model[-1])
        if wanted and last.post_process:
            self._head = Head(last, wanted, config)

    def measure(self, now: bool) -> None:
        """Compute the metrics of the user in the next forward passes, or do not."""
        if self._head is not None:
            self._head.measures = now

    def begin(self, chunk: torch.nn.Module, batch: MicroBatch) -> dict[str, Any]:
        """Begin the forward pass of `chunk` on `batch`. Returns further arguments of it."""
        if self._head is not None:
            self._head.batch = batch
        of_experts = experts.arguments(chunk, batch) if experts.needs_mask(chunk, self._data) else {}
        return multi_token.arguments(chunk, batch) | of_experts

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
