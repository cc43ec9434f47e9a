"""Memory of weights with their gradients and optimizer state."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from hpcgen.planning.setup import Setup
from trainer.contract.model.experts import moe_layer_pattern
from trainer.contract.model.model_size import (
    experts_parameter_count,
    last_layer_has_experts,
    layer_parameter_count,
    norm_parameter_count,
    replicated_parameter_count,
)
from trainer.contract.model.pipeline import embedding_stages, mtp_stage
from trainer.contract.optimizers.kind import Kind
from trainer.contract.record import record


@record
class Counts:
    """Numbers of parameters on a device."""

    tables: float = 0.0
    """Embeddings, output layer, and norms outside of layers."""
    layers: float = 0.0
    """Layers without their routed experts."""
    experts: float = 0.0
    """Routed experts."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.tables + other.tables, self.layers + other.layers, self.experts + other.experts)


class ParameterBytes(NamedTuple):
    """Bytes on a device, of one parameter or of several."""

    weights: float
    """Weights, with their copies in FP8."""
    gradients: float
    optimizer: float
    """State of the optimizer, with the fp32 copies of weights."""

    def times(self, number: float) -> ParameterBytes:
        """The bytes of `number` parameters."""
        return ParameterBytes(number * self.weights, number * self.gradients, number * self.optimizer)


def bytes_per_parameter(setup: Setup, kind: Kind, *, of_expert: bool = False) -> ParameterBytes:
    """Bytes per parameter of `kind` on a device. A distributed optimizer shards its state over DP x CP / instances, and
    that of experts over the ranks that hold the same experts.

    bf16 and fp16: weight 2, fp32 gradient 4, and fp32 copy with moments / shards (Megatron-Core's
    docs/api-guide/dist_optimizer.md). fp32: weight 4, gradient 4, and moments / shards. FP8 adds a byte for each weight
    of a layer and one for its transpose, which Transformer Engine caches between microbatches.
    """
    shards = num_shards(setup, of_expert=of_expert)
    state = setup.optimizer.state_bytes(kind)
    if setup.training.precision == "fp32":
        return ParameterBytes(4, 4, (state - 4) / shards)
    in_fp8 = 2 if setup.training.fp8 and kind != "table" else 0
    return ParameterBytes(2 + in_fp8, setup.gradient_bytes, state / shards)


def num_shards(setup: Setup, *, of_expert: bool = False) -> int:
    """Number of ranks that share the optimizer state of a parameter."""
    layout = setup.layout
    ranks = layout.data_parallel_size * layout.context_parallel_size
    if of_expert:
        ranks = layout.expert_data_parallel_size or 1
    is_sharded = setup.optimizer.sharding == "distributed"
    return ranks // layout.num_distributed_optimizer_instances if is_sharded else 1


def parameter_bytes(setup: Setup, stage: int) -> ParameterBytes:
    """Bytes of the weights of a pipeline stage with their gradients and optimizer state, on one device."""
    counts = stage_parameter_counts(setup, stage)
    of_tables = bytes_per_parameter(setup, "table").times(counts.tables)
    of_layers = bytes_per_parameter(setup, "layer").times(counts.layers)
    of_experts = bytes_per_parameter(setup, "layer", of_expert=True).times(counts.experts)
    return ParameterBytes(*map(sum, zip(of_tables, of_layers, of_experts, strict=True)))


@functools.lru_cache(maxsize=256)  # the time of a step needs them several times
def stage_parameter_counts(setup: Setup, stage: int) -> Counts:
    """Numbers of parameters of a pipeline stage on one device."""
    model, layout = setup.model, setup.layout
    pattern, total = moe_layer_pattern(model), Counts()
    kinds = Counter(pattern[number] for layers in layout.layers_of_stage(stage) for number in layers)
    for has_experts, count in kinds.items():
        of_layer = _layer_counts(setup, has_experts=has_experts)
        total += Counts(layers=count * of_layer.layers, experts=count * of_layer.experts)
    return total + _end_counts(setup, stage)


def _layer_counts(setup: Setup, *, has_experts: bool) -> Counts:
    model, layout = setup.model, setup.layout
    complete = replicated_parameter_count(model, has_experts=has_experts)
    divided = layer_parameter_count(model, has_experts=has_experts) - complete
    expert_ranks = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
    return Counts(
        layers=complete + divided / layout.tensor_model_parallel_size,
        experts=experts_parameter_count(model) / expert_ranks if has_experts else 0.0,
    )


def _end_counts(setup: Setup, stage: int) -> Counts:
    """Parameters before the first and after the last layer.

    The output layer is a copy of the embedding if they are tied. With MTP layers, the final norm follows the last layer
    (megatron/core/transformer/transformer_block.py, has_final_layernorm_in_this_stage).
    """
    model, layout = setup.model, setup.layout
    table = table_parameter_count(setup)
    total = Counts()
    if stage in embedding_stages(model, setup.parallelism):
        total += Counts(tables=table)
    if stage == 0 and model.position_embedding_type == "learned_absolute":
        assert model.max_position_embeddings
        total += Counts(tables=model.max_position_embeddings * model.hidden_size)
    is_last = stage == layout.pipeline_model_parallel_size - 1
    if is_last and model.untie_embeddings_and_output_weights:
        total += Counts(tables=table)
    has_last_layer = any(model.num_layers - 1 in layers for layers in layout.layers_of_stage(stage))
    if is_last if model.mtp_num_layers is None else has_last_layer:
        total += Counts(tables=norm_parameter_count(model))
    return total + _mtp_counts(setup) if stage == mtp_stage(setup.parallelism) else total


def _mtp_counts(setup: Setup) -> Counts:
    """MTP layers: each has a layer like the last one, a projection and three norms."""
    model, number = setup.model, setup.model.mtp_num_layers or 0
    if not number:
        return Counts()
    layer = _layer_counts(setup, has_experts=last_layer_has_experts(model))
    projection = 2 * model.hidden_size**2 / setup.layout.tensor_model_parallel_size
    norms = 3 * norm_parameter_count(model)
    return replace(layer, layers=number * (layer.layers + projection + norms), experts=number * layer.experts)


def table_parameter_count(setup: Setup) -> float:
    """Parameters of the embedding or of the output layer on a device."""
    assert setup.model.padded_vocab_size
    return setup.model.padded_vocab_size * setup.model.hidden_size / setup.layout.tensor_model_parallel_size
