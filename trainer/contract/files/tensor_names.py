"""Names of the tensors in a checkpoint: those of the optimizer, and those that have all layers."""

from __future__ import annotations

import re

OPTIMIZER_STATE = "optimizer.state"
"""Beginning of the optimizer's tensors. The name of the state and that of the weight follow, each after a dot."""

AVERAGE = "ema"
"""Name of the average of a weight, next to `param` and the moments."""

_ALL_LAYERS = re.compile(r"\.layers\.(?!\d)")


def has_all_layers(name: str) -> bool:
    """True if Megatron-Core stacks the layers in the tensor `name`."""
    return _ALL_LAYERS.search(name) is not None


def name_in_layer(name: str, layer: int) -> str:
    """Name that the part of a stacked tensor for one layer, counted from 0, has as a tensor of its own."""
    return _ALL_LAYERS.sub(f".layers.{layer}.", name, count=1)
