"""The main output of the model: the losses that a step minimizes, and the sums that are logged of them.

A chunk has a `Head` only if it computes more than the cross entropy of the next token.
Shapes: b microbatch, s tokens of the sequence on this context-parallel rank, w this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from trainer.contract.config import TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.contract.files.metrics_columns import OBJECTIVE, OUTPUT_Z_LOSS
from trainer.data.microbatch import MicroBatch
from trainer.model import vocab_parallel
from trainer.model.multi_token import PredictingModel
from trainer.model.user_losses import Logits, UserLoss, UserMetric, load_metrics, metric_names


@dataclass(frozen=True)
class Wanted:
    """Values that the main output computes besides the cross entropy. All ranks know it."""

    loss: UserLoss | None
    z_loss_coeff: float | None
    metrics: tuple[UserMetric, ...]
    losses: tuple[str, ...]
    """Columns of metrics.jsonl for losses, in the order of `Head.sums`."""
    metric_names: tuple[str, ...]
    """Columns for metrics, which follow."""

    @classmethod
    def of(cls, config: TrainerConfig) -> Wanted:
        """Load the user's functions.

        Raises:
            ConfigError: a function cannot be imported, or its arguments are others.
        """
        loss, coefficient = UserLoss.load(config), config.training.z_loss_coeff
        of_user = () if loss is None else (OBJECTIVE, *loss.terms)
        of_z = () if coefficient is None else (OUTPUT_Z_LOSS,)
        return cls(loss, coefficient, load_metrics(config), (*of_user, *of_z), metric_names(config))

    def __bool__(self) -> bool:
        return bool(self.losses or self.metrics)


class Head:
    """Computes the losses of one chunk. It calls Megatron-Core's cross entropy if this is what a step minimizes."""

    batch: MicroBatch
    """The microbatch whose forward pass comes next."""
    measures = False
    """Compute the metrics."""
    loss_sum: torch.Tensor
    """Sum of the cross entropy over the tokens of the latest microbatch that count."""
    sums: list[torch.Tensor]
    """The sum and the number of tokens of each loss in the latest microbatch, then those of each metric."""

    def __init__(self, chunk: GPTModel, wanted: Wanted, config: TrainerConfig) -> None:
        """Attach the head to an unwrapped `chunk`.

        Raises:
            TrainerError: the model of the user does not compute its losses as GPTModel does.
        """
        method = "main_loss" if isinstance(chunk, PredictingModel) else "compute_language_model_loss"
        if not hasattr(chunk, method):
            raise TrainerError(
                f"model.model_provider returns a {type(chunk).__name__} without the method {method} of GPTModel, "
                "which training.loss, training.metrics and training.z_loss_coeff need. Derive the model from GPTModel"
            )
        self._loss = None if wanted.loss is None else wanted.loss.instance(config)
        self._coefficient, self._metrics = wanted.z_loss_coeff, wanted.metrics
        self._columns = wanted.losses
        self._group = chunk.pg_collection.tp
        self._cross_entropy: Callable[..., Any] = getattr(chunk, method)
        setattr(chunk, method, self._losses)

    def _losses(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The losses to minimize [b, s], from `labels` [b, s] and `logits` [s, b, w]."""
        mask, by_sample = self.batch.loss_mask, logits.transpose(0, 1)
        parts: Mapping[str, torch.Tensor] = {}
        if self._loss is None:
            # Cross entropies may overwrite the logits, so the metrics come first.
            measured = self._measured(Logits(by_sample), labels)
            losses, cross_entropy, z_losses = self._usual(labels, logits)
        else:
            cross_entropy, z_losses = self._unused(labels, logits)
            shared = Logits(by_sample)
            losses, parts = self._loss(shared, labels, self.batch)
            measured = self._measured(shared, labels)
        if z_losses is not None:
            losses = losses + self._coefficient * z_losses
        known = {OBJECTIVE: losses, OUTPUT_Z_LOSS: z_losses, **parts}
        tokens = mask.sum()
        self.loss_sum = _sum(cross_entropy, mask)
        self.sums = [
            value for name in self._columns for value in (_sum(known[name], mask), tokens)
        ] + measured
        return losses

    def _usual(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The cross entropy twice, as the losses and for the log, and the z-losses.

        The cross entropy is log Z minus the logit of the label, so log Z needs no second pass over the logits.
        Z-loss: PaLM, arXiv 2204.02311, section 5.
        """
        if self._coefficient is None:
            losses = self._cross_entropy(labels, logits)
            return losses, losses, None
        logits, of_labels = vocab_parallel.with_label_logits(logits, labels.t(), self._group)
        losses = self._cross_entropy(labels, logits).float()
        return losses, losses, (losses + of_labels.t()).square()

    def _unused(self, labels: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The cross entropy without gradients, and the z-losses. Neither changes the logits, which others read."""
        with torch.set_grad_enabled(self._coefficient is not None and torch.is_grad_enabled()):
            log_z = vocab_parallel.log_z(logits, self._group).t()
        of_labels = vocab_parallel.logits_of(logits.detach(), labels.t().unsqueeze(-1), self._group)
        cross_entropy = log_z.detach() - of_labels.squeeze(-1).t()
        return cross_entropy, None if self._coefficient is None else log_z.square()

    def _measured(self, logits: Logits, labels: torch.Tensor) -> list[torch.Tensor]:
        """The sum and the number of each metric; zeros if they are not asked for."""
        if not self.measures:
            return [self.batch.loss_mask.new_zeros(())] * (2 * len(self._metrics))
        return [value for metric in self._metrics for value in metric(logits, labels, self.batch)]


def _sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values.detach().float() * mask).sum()
