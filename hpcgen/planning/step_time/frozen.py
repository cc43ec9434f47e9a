"""Time that the backward pass saves where weights are frozen (training.freeze)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcgen.planning.setup import Setup, once_per_setup
from hpcgen.planning.step_time.layer import Layer, chunk_time
from hpcgen.planning.step_time.work import Passes, Seconds, added
from trainer.contract.model.experts import moe_layer_pattern
from trainer.contract.model.frozen import frozen


class FrozenShares(NamedTuple):
    """What is frozen of the parts of a model. MTP layers count as trained."""

    embedding: bool
    output: bool
    """True if the matrix that computes the logits is frozen."""
    layers: tuple[float, ...]
    """Share of the weights of the matrix products that is frozen, by layer. Empty if nothing is."""
    num_unreached: int
    """Number of first layers that the backward pass does not reach: neither they nor the embeddings are trained."""


@once_per_setup
def frozen_shares(setup: Setup) -> FrozenShares:
    """The frozen shares of a run."""
    model = setup.model
    if not setup.training.freeze:
        return FrozenShares(False, False, (), 0)
    found = frozen(model, setup.training.freeze, transformer_engine=setup.uses_engine)
    complete = frozen(model, ("*",), transformer_engine=setup.uses_engine)
    has_embedding = found.embedding > 0
    shares = [kept / all_of for kept, all_of in zip(found.matrices, complete.matrices, strict=True)]
    is_trained = found.has_trained if has_embedding and found.positions == complete.positions else [True]
    unreached = len(list(itertools.takewhile(lambda trained: not trained, is_trained[: model.num_layers])))
    return FrozenShares(
        has_embedding,
        found.output > 0 if model.untie_embeddings_and_output_weights else has_embedding,
        tuple(shares[: model.num_layers]),
        unreached,
    )


def saved_time(
    setup: Setup, layers: Mapping[bool, Layer], frozen_layers: Mapping[bool, Layer], numbers: Sequence[int]
) -> Seconds:
    """Time that the backward pass of a model chunk saves, whose layers have these `numbers`.

    Only in the first chunk, the pass does not reach its first frozen layers: what a later stage of a pipeline receives
    has a gradient.
    """
    kept, pattern = frozen_shares(setup), moe_layer_pattern(setup.model)
    unreached = [number for number in numbers if numbers[0] == 0 and number < kept.num_unreached]
    saved = chunk_time(setup, layers, [pattern[number] for number in unreached]).backward
    parts = [
        Passes(backward=layers[pattern[number]].kept.backward).times(kept.layers[number])
        + Passes(backward=frozen_layers[pattern[number]].kept.backward).times(-kept.layers[number])
        for number in numbers[len(unreached) :]
    ]
    return saved + added(parts).backward
