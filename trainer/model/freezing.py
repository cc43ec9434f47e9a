"""Parameters that are not trained: they have neither gradients nor optimizer state, and keep their values bit for bit.

Megatron-Core leaves parameters without `requires_grad` out of its gradient buffers and of the optimizer, if they are
marked before the model is wrapped for data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from trainer.contract.config import ConfigError, TrainingConfig
from trainer.contract.model.frozen import is_frozen
from trainer.model.parameter_names import global_names, over_all_ranks


def freeze(chunks: Sequence[torch.nn.Module], training: TrainingConfig) -> None:
    """Freeze the parameters of this rank's chunks that training.freeze names. Every rank must call this.

    Raises:
        ConfigError: on all ranks, if a pattern matches no parameter on any rank, or if nothing is left to train.
    """
    if not training.freeze:
        return
    matched, trained, names = set(), set(), set()
    for name, parameter in (pair for chunk in chunks for pair in global_names(chunk)):
        names.add(name)
        patterns = {pattern for pattern in training.freeze if is_frozen(name, [pattern])}
        matched |= patterns
        if patterns:
            parameter.requires_grad = False
        else:
            trained.add(name)
    _check(training.freeze, over_all_ranks(matched), over_all_ranks(trained), over_all_ranks(names))
    if training.recompute_granularity is not None:
        differentiate_embeddings(chunks)


def differentiate_embeddings(chunks: Iterable[torch.nn.Module]) -> None:
    """Make the backward pass reach recomputed layers although the embedding is frozen.

    A recomputed part is one node of the graph, which has gradients only if one of its inputs has. Without this, the
    weights of recomputed layers after a frozen embedding would silently get no gradients.
    """

    def require_gradients(_: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_()

    for chunk in chunks:
        if (embedding := getattr(chunk, "embedding", None)) is not None:
            embedding.register_forward_hook(require_gradients)


def _check(patterns: Sequence[str], matched: set[str], trained: set[str], names: set[str]) -> None:
    if missed := [pattern for pattern in patterns if pattern not in matched]:
        raise ConfigError(
            f"training.freeze: {', '.join(map(repr, missed))} matches no parameter. The model has "
            f"{', '.join(sorted(names))}"
        )
    if not trained:
        raise ConfigError(
            "training.freeze: matches all parameters of the model, so there is nothing to train"
        )
