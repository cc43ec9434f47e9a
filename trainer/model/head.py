"""The main output of the model: the losses that a step differentiates, and the sums that are logged of them.

A chunk has a `Head` only if its losses are not just the cross entropy of the next token.
Shapes: b microbatch, s tokens of the sequence on this context-parallel rank, w this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.models.gpt import GPTModel

from trainer.contract.config import TrainingConfig
from trainer.contract.errors import TrainerError
from trainer.data.loader import MicroBatch
from trainer.model.multi_token import PredictingModel
from trainer.model.vocab_parallel import with_label_logits

Z_LOSS = "output_z_loss"
"""Column of metrics.jsonl for training.z_loss_coeff. The z-loss of routers is `z_loss`, as in Megatron-LM."""


def is_needed(training: TrainingConfig) -> bool:
    """True if the last chunk needs a head."""
    return training.z_loss_coeff is not None


def names(training: TrainingConfig) -> tuple[str, ...]:
    """Columns of metrics.jsonl, in the order of `Head.sums`."""
    return (Z_LOSS,) if training.z_loss_coeff is not None else ()


class Head:
    """Computes the losses of one chunk in place of Megatron-Core's cross entropy, which it calls."""

    batch: MicroBatch
    """The microbatch whose forward pass comes next."""
    loss_sum: torch.Tensor
    """Sum of the cross entropy over the tokens of the latest microbatch."""
    sums: Sequence[torch.Tensor] = ()
    """The sum and the number of tokens of each column in the latest microbatch."""

    def __init__(self, chunk: GPTModel, training: TrainingConfig) -> None:
        """Attach the head to an unwrapped `chunk`.

        Raises:
            TrainerError: the model of the user does not compute its losses as GPTModel does.
        """
        assert training.z_loss_coeff is not None
        self.chunk, self._coefficient = chunk, training.z_loss_coeff
        method = "main_loss" if isinstance(chunk, PredictingModel) else "compute_language_model_loss"
        if not hasattr(chunk, method):
            raise TrainerError(
                f"model.model_provider returns a {type(chunk).__name__} without the method {method} of GPTModel, "
                "which training.z_loss_coeff needs. Derive the model from GPTModel"
            )
        self._cross_entropy = getattr(chunk, method)
        setattr(chunk, method, self._losses)

    def _losses(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The losses to differentiate [b, s], from `labels` [b, s] and `logits` [s, b, w].

        The cross entropy is log Z minus the logit of the label, so log Z needs no second pass over the logits.
        Z-loss: PaLM, arXiv 2204.02311, section 5.
        """
        mask = self.batch.loss_mask
        # The cross entropy may overwrite the logits, so their values are taken first.
        logits, of_labels = with_label_logits(logits, labels.t(), self.chunk.pg_collection.tp)
        cross_entropy = self._cross_entropy(labels, logits).float()
        z_losses = (cross_entropy + of_labels.t()).square()
        self.loss_sum = (cross_entropy.detach() * mask).sum()
        self.sums = (z_losses.detach() * mask).sum(), mask.sum()
        return cross_entropy + self._coefficient * z_losses
