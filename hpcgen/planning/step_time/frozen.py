"""Time that the backward pass saves where weights are frozen (training.freeze)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcgen.planning.frozen import frozen_shares
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time.layer import Layer, chunk_time
from hpcgen.planning.step_time.work import Passes, Seconds, added
from trainer.contract.model.experts import moe_layer_pattern


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
