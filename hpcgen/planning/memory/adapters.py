"""Memory of LoRA adapters: their parameters on a device, and what they keep in a layer. Inputs that frozen linear
layers do not keep.

A linear layer needs its input only for the gradient of its weight. Sources: LinearWithFrozenWeight in
megatron/core/tensor_parallel/layers.py; backward_needs_input in Transformer Engine's pytorch/module/linear.py. An
adapter keeps the input of its linear layer itself.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

from hpcgen.planning.memory.mlp import dense_kept_bytes, expert_widths
from hpcgen.planning.setup import Setup, once_per_setup
from trainer.contract.config import ModelConfig
from trainer.contract.model.adapters import Linear, layer_linears, matches, targets
from trainer.contract.model.experts import moe_layer_pattern
from trainer.contract.model.frozen import is_frozen
from trainer.contract.model.model_size import parameter_names

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
            copies = at_once = 1.0
            if linear.num_experts:  # one expert after another
                copies, at_once = setup.received_copies, setup.received_copies / setup.local_experts
            kept += copies * _kept(setup, linear)
            working = max(working, 2 * at_once * setup.value_bytes * _outputs(setup, linear))
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


def unkept_bytes(setup: Setup, numbers: Iterable[int]) -> float:
    """Bytes per token that the layers with these `numbers` keep less than if all their weights were trained.

    With full recomputation and CUDA graphs, it is 0: layers then keep other tensors.
    """
    if setup.recomputes_layers or setup.training.cuda_graph_impl != "none":
        return 0.0
    unkept = _unkept_of_layers(setup)
    return sum(unkept[number] for number in numbers) if unkept else 0.0


@once_per_setup
def _unkept_of_layers(setup: Setup) -> list[float]:
    """By layer. Empty if all weights are trained."""
    if setup.trains_weights and not setup.training.freeze:
        return []
    needed = _need_inputs(setup)
    return [
        sum(
            _input_bytes(setup, linear)
            for linear in layer_linears(setup.model, number, has_experts=has_experts)
            if linear.name not in needed
        )
        for number, has_experts in enumerate(moe_layer_pattern(setup.model))
    ]


def _need_inputs(setup: Setup) -> frozenset[str]:
    """Names of the linear layers that are trained, or have adapters."""
    if not setup.trains_weights:
        return frozenset(linear.name for linear in targets(setup.lora, setup.model))
    return _trained(setup.model, setup.training.freeze, setup.uses_engine)


@functools.lru_cache(maxsize=16)
def _trained(model: ModelConfig, patterns: tuple[str, ...], transformer_engine: bool) -> frozenset[str]:
    """Names of the modules with a trained weight. Experts of a layer have one name."""
    return frozenset(
        re.sub(r"\.local_experts\.\d+", "", name.rpartition(".")[0])
        for name in parameter_names(model, transformer_engine=transformer_engine)
        if not is_frozen(name, patterns)
    )


def _input_bytes(setup: Setup, linear: Linear) -> float:
    """Bytes per token of the input of a linear layer, if nothing else keeps it and it is not computed again."""
    if ".mlp." not in linear.name:
        return _attention_input_bytes(setup, linear)
    is_second = linear.kind == "linear_fc2"
    if linear.num_experts:
        if setup.recomputes("moe") or (is_second and setup.recomputes("moe_act")):
            return 0.0
        return setup.received_copies * (expert_widths(setup)[1] if is_second else setup.hidden_bytes)
    if ".shared_experts." in linear.name:  # the router keeps the input of the first product
        width = linear.parts[0].inputs / setup.layout.tensor_model_parallel_size
        return setup.value_bytes * width if is_second and not setup.recomputes("moe") else 0.0
    if setup.recomputes("mlp"):
        return 0.0
    return dense_kept_bytes(setup)[1] if is_second else setup.sharded_operand_bytes


def _attention_input_bytes(setup: Setup, linear: Linear) -> float:
    """Bytes per token of the input of a projection. Attention keeps its output, unless it is computed again."""
    if linear.kind == "linear_qkv":
        return 0.0 if setup.recomputes("layernorm") else setup.sharded_operand_bytes
    width = linear.parts[0].inputs / setup.layout.tensor_model_parallel_size
    return setup.value_bytes * width if setup.recomputes("core_attn") else 0.0
