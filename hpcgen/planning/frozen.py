"""Parts of a run's model that are not trained, on which its memory and the time of a step depend."""

from __future__ import annotations

from typing import NamedTuple

from hpcgen.planning.setup import Setup, once_per_setup
from trainer.contract.model.adapters import active_parameter_counts
from trainer.contract.model.frozen import frozen, layers_without_gradients


class FrozenShares(NamedTuple):
    """Frozen shares of the parts of a model. MTP layers count as trained."""

    embedding: bool
    output: bool
    """True if the matrix that computes the logits is frozen."""
    layers: tuple[float, ...]
    """Share of the weights of the matrix products that training.freeze names, by layer. Empty without the key."""
    num_unreached: int
    """Number of first layers that the backward pass does not reach: neither they nor the embeddings are trained, and
    nothing is recomputed (trainer/model/freezing.py, differentiate_embeddings)."""


@once_per_setup
def frozen_shares(setup: Setup) -> FrozenShares:
    """The frozen shares of a run."""
    model, patterns = setup.model, setup.training.freeze
    if setup.trains_weights and not patterns:
        return FrozenShares(False, False, (), 0)
    complete = frozen(model, ("*",), transformer_engine=setup.uses_engine)
    recomputes = setup.training.recompute_granularity is not None
    if not setup.trains_weights:
        has_trained = [count > 0 for count in active_parameter_counts(setup.lora, model)]
        unreached = layers_without_gradients(model, complete, has_trained)
        return FrozenShares(True, True, (), 0 if recomputes else unreached)
    found = frozen(model, patterns, transformer_engine=setup.uses_engine)
    unreached = layers_without_gradients(model, found, found.has_trained[: model.num_layers])
    has_embedding = found.embedding > 0
    shares = [kept / all_of for kept, all_of in zip(found.matrices, complete.matrices, strict=True)]
    return FrozenShares(
        has_embedding,
        found.output > 0 if model.untie_embeddings_and_output_weights else has_embedding,
        tuple(shares[: model.num_layers]),
        0 if recomputes else unreached,
    )
