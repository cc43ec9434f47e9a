"""Memory of LoRA adapters: their parameters on a device, and what they keep in a layer."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from hpcgen.planning.setup import Setup, once_per_setup
from trainer.contract.model.adapters import Linear, layer_linears, matches, targets

MASK_BYTES = 1
"""Per value of a dropout mask."""


class AdapterCounts(NamedTuple):
    """Numbers of adapter parameters on a device."""

    layers: float = 0.0
    experts: float = 0.0


@once_per_setup
def adapter_counts(setup: Setup) -> list[AdapterCounts]:
    """The adapter parameters of each pipeline stage, on one device. A part of an adapter is not divided."""
    stages = setup.layout.pipeline_model_parallel_size
    counts = [AdapterCounts()] * stages
    if setup.lora.rank is None:
        return counts
    ends = list(itertools.accumulate(setup.layout.chunk_layers))
    for linear in targets(setup.lora, setup.model):
        stage = next(chunk for chunk, end in enumerate(ends) if linear.layer < end) % stages
        layers, experts = counts[stage]
        number = _on_device(setup, linear)
        counts[stage] = (
            AdapterCounts(layers, experts + number)
            if linear.num_experts
            else AdapterCounts(layers + number, experts)
        )
    return counts


def _on_device(setup: Setup, linear: Linear) -> float:
    """Parameters of the adapters of a linear layer on a device."""
    rank, layout = setup.lora.rank or 0, setup.layout
    if linear.num_experts:
        return linear.parameter_count(rank) / layout.expert_model_parallel_size
    ranks = layout.tensor_model_parallel_size
    sides = (1, ranks) if linear.divided == "outputs" else (ranks, 1)
    return sum(rank * (part.inputs / sides[0] + part.outputs / sides[1]) for part in linear.parts)


class Kept(NamedTuple):
    """Bytes per token of adapters in the attention or in the MLP of a layer."""

    kept: float
    """From the forward to the backward pass: A x of each part, and with dropout the dropped input and its mask."""
    working: float
    """While an adapter is computed: its output in parts, in the order of the linear layer, and added to that."""


def adapter_bytes(setup: Setup, module: str, *, has_experts: bool) -> Kept:
    """The adapters of the `module` self_attention or mlp of a layer. The inputs of the linear layers count there.

    The layer counts as if it had all adapters that any layer of its kind has.
    """
    if setup.lora.rank is None:
        return Kept(0.0, 0.0)
    kept = working = 0.0
    for linear in layer_linears(setup.model, 0, has_experts=has_experts):
        if f".{module}." in linear.name and _is_target_anywhere(setup, linear):
            copies = setup.received_copies if linear.num_experts else 1.0
            kept += copies * _kept(setup, linear)
            working = max(working, 2 * copies * setup.value_bytes * _outputs(setup, linear))
    return Kept(kept, working)


def _kept(setup: Setup, linear: Linear) -> float:
    low = setup.value_bytes * (setup.lora.rank or 0) * len(linear.parts)
    if not setup.lora.dropout:
        return low
    inputs = linear.parts[0].inputs * (setup.value_bytes + MASK_BYTES)
    if linear.num_experts:
        return low + inputs
    if linear.divided == "outputs":
        return low + setup.sharded(inputs)
    return low + inputs / setup.layout.tensor_model_parallel_size


def _outputs(setup: Setup, linear: Linear) -> float:
    outputs = sum(part.outputs for part in linear.parts)
    is_divided = linear.divided == "outputs" and not linear.num_experts
    return outputs / setup.layout.tensor_model_parallel_size if is_divided else outputs


def _is_target_anywhere(setup: Setup, linear: Linear) -> bool:
    """True if this linear layer has an adapter in any transformer layer."""
    patterns = setup.lora.target_modules
    if patterns is None:
        return True
    names = (
        linear.name.replace(".layers.0.", f".layers.{number}.", 1) for number in range(setup.model.num_layers)
    )
    return any(matches(pattern, name) for name in names for pattern in patterns)
