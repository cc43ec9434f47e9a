"""Memory of weights with their gradients and optimizer state."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from hpcgen.planning.memory.adapters import AdapterCounts, adapter_counts
from hpcgen.planning.setup import Setup, once_per_setup
from trainer.contract.config import ModelConfig
from trainer.contract.model.experts import moe_layer_pattern
from trainer.contract.model.frozen import Frozen, frozen
from trainer.contract.model.model_size import (
    experts_parameter_count,
    last_layer_has_experts,
    layer_parameter_count,
    norm_parameter_count,
    replicated_parameter_count,
)
from trainer.contract.model.pipeline import embedding_stages, mtp_stage
from trainer.contract.optimizers.kind import AVERAGE_BYTES, Kind


class Counts(NamedTuple):  # faster than a record: an estimate adds up dozens
    """Numbers of parameters on a device."""

    tables: float = 0.0
    """Embeddings, output layer, and norms outside of layers."""
    layers: float = 0.0
    """Layers without their routed experts."""
    experts: float = 0.0
    """Routed experts."""

    def __add__(self, other: Counts) -> Counts:  # type: ignore[override]
        return Counts(self.tables + other.tables, self.layers + other.layers, self.experts + other.experts)

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.tables - other.tables, self.layers - other.layers, self.experts - other.experts)


class ParameterBytes(NamedTuple):
    """Bytes on a device, of one parameter or of several."""

    weights: float
    """Weights, with their copies in FP8."""
    gradients: float
    optimizer: float
    """State of the optimizer, with the fp32 copies of weights."""

    def times(self, number: float, trained: float) -> ParameterBytes:
        """The bytes of `number` parameters, of which `trained` are trained."""
        return ParameterBytes(number * self.weights, trained * self.gradients, trained * self.optimizer)


def bytes_per_parameter(setup: Setup, kind: Kind, *, of_expert: bool = False) -> ParameterBytes:
    """Bytes per parameter of `kind` on a device. A distributed optimizer shards its state over DP x CP / instances, and
    that of experts over the ranks that hold the same experts.

    bf16 and fp16: weight 2, fp32 gradient 4, and fp32 copy with moments / shards (Megatron-Core's
    docs/api-guide/dist_optimizer.md). fp32: weight 4, gradient 4, and moments / shards. FP8 adds a byte for each weight
    of a layer and one for its transpose, which Transformer Engine caches between microbatches.
    """
    shards = num_shards(setup, of_expert=of_expert)
    state = setup.optimizer.state_bytes(kind) + (AVERAGE_BYTES if setup.training.ema_decay else 0)
    if setup.training.precision == "fp32":
        return ParameterBytes(4, 4, (state - 4) / shards)
    in_fp8 = 2 if setup.training.fp8 and kind != "table" else 0
    return ParameterBytes(2 + in_fp8, setup.gradient_bytes, state / shards)


def num_shards(setup: Setup, *, of_expert: bool = False) -> int:
    """Number of ranks that share the optimizer state of a parameter. 1 for experts, if the model has none."""
    layout = setup.layout
    ranks = layout.data_parallel_size * layout.context_parallel_size
    of_parameter = layout.expert_data_parallel_size if of_expert else ranks
    if of_parameter is None or setup.optimizer.sharding == "replicated":
        return 1
    return of_parameter // layout.num_distributed_optimizer_instances


def parameter_bytes(setup: Setup, stage: int) -> ParameterBytes:
    """Bytes of the weights of a pipeline stage with their gradients and optimizer state, on one device."""
    return _bytes(setup, stage_parameter_counts(setup, stage), trained_parameter_counts(setup)[stage])


def total_parameter_bytes(setup: Setup) -> float:
    """The sum of these bytes over the stages."""
    of_layers = _counts_of_layers(setup, [moe_layer_pattern(setup.model)])
    counts = of_layers + Counts(tables=sum(_tables(setup))) + _mtp_counts(setup)
    of_adapters = sum(map(_of_adapters, adapter_counts(setup)), Counts())
    trained = of_adapters if not setup.trains_weights else counts - sum(_frozen_counts(setup), Counts())
    return sum(_bytes(setup, counts + of_adapters, trained))


@once_per_setup
def trained_parameter_counts(setup: Setup) -> list[Counts]:
    """The parameters of each stage on one device that have gradients and optimizer state."""
    if not setup.trains_weights:
        return list(map(_of_adapters, adapter_counts(setup)))
    complete = _parameter_counts(setup)
    return [counts - frozen for counts, frozen in zip(complete, _frozen_counts(setup), strict=True)]


def _of_adapters(counts: AdapterCounts) -> Counts:
    return Counts(layers=counts.layers, experts=counts.experts)


def _bytes(setup: Setup, counts: Counts, trained: Counts) -> ParameterBytes:
    """Bytes of parameters, of which only those in `trained` have gradients and optimizer state."""
    parts = [
        bytes_per_parameter(setup, "table").times(counts.tables, trained.tables),
        bytes_per_parameter(setup, "layer").times(counts.layers, trained.layers),
    ]
    # A dense model may have more instances of the optimizer than ranks with the same experts.
    if counts.experts:
        of_expert = bytes_per_parameter(setup, "layer", of_expert=True)
        parts.append(of_expert.times(counts.experts, trained.experts))
    return ParameterBytes(*map(sum, zip(*parts, strict=True)))


def stage_parameter_counts(setup: Setup, stage: int) -> Counts:
    """Numbers of parameters of a pipeline stage on one device, with adapters."""
    return _parameter_counts(setup)[stage] + _of_adapters(adapter_counts(setup)[stage])


@once_per_setup
def _parameter_counts(setup: Setup) -> list[Counts]:
    """The parameters of each stage. Most stages are equal."""

    @functools.cache
    def counts_of(chunks: Sequence[Sequence[bool]], tables: float) -> Counts:
        of_layers = _counts_of_layers(setup, chunks)
        return Counts(tables, of_layers.layers, of_layers.experts)

    counts = [counts_of(*stage) for stage in zip(layer_kinds(setup), _tables(setup), strict=True)]
    counts[mtp_stage(setup.parallelism)] += _mtp_counts(setup)
    return counts


@once_per_setup
def _frozen_counts(setup: Setup) -> list[Counts]:
    """Parameters of each stage that training.freeze names. The share of a layer on a device is that of all of it."""
    stages = setup.layout.pipeline_model_parallel_size
    counts = [Counts()] * stages
    if not (patterns := setup.training.freeze):
        return counts
    found = frozen(setup.model, patterns, transformer_engine=setup.uses_engine)
    of_layers = [_frozen_in_layer(setup, found, number) for number in range(len(found.layers))]
    ends = list(itertools.accumulate(setup.layout.chunk_layers))
    for chunk, (end, number) in enumerate(zip(ends, setup.layout.chunk_layers, strict=True)):
        counts[chunk % stages] += sum(of_layers[end - number : end], Counts())
    counts[mtp_stage(setup.parallelism)] += sum(of_layers[setup.model.num_layers :], Counts())
    shards = setup.layout.tensor_model_parallel_size
    for stage in embedding_stages(setup.model, setup.parallelism):
        counts[stage] += Counts(tables=found.embedding / shards)
    counts[0] += Counts(tables=found.positions)
    counts[-1] += Counts(tables=found.output / shards)
    counts[_final_norm_stage(setup)] += Counts(tables=found.final_norm)
    return counts


def _frozen_in_layer(setup: Setup, found: Frozen, number: int) -> Counts:
    """Frozen parameters of the layer `number` on a device."""
    model = setup.model
    pattern = (*moe_layer_pattern(model), *[last_layer_has_experts(model)] * _num_mtp(model))
    has_experts, is_mtp = pattern[number], number >= model.num_layers
    own = _mtp_counts(setup) if is_mtp else _layer_counts(setup)[has_experts]
    each = _num_mtp(model) if is_mtp else 1
    complete = layer_parameter_count(model, has_experts=has_experts)
    if is_mtp:
        complete += 2 * model.hidden_size**2 + 3 * norm_parameter_count(model)
    of_experts = found.experts[number] / experts_parameter_count(model) if has_experts else 0.0
    return Counts(
        layers=own.layers / each * found.layers[number] / complete, experts=own.experts / each * of_experts
    )


def _num_mtp(model: ModelConfig) -> int:
    return model.mtp_num_layers or 0


def _counts_of_layers(setup: Setup, chunks: Sequence[Sequence[bool]]) -> Counts:
    """Parameters of the layers in these chunks."""
    total, of_layer = Counts(), _layer_counts(setup)
    for has_experts, number in Counter(itertools.chain.from_iterable(chunks)).items():
        layer = of_layer[has_experts]
        total += Counts(layers=number * layer.layers, experts=number * layer.experts)
    return total


def layer_kinds(setup: Setup) -> tuple[tuple[tuple[bool, ...], ...], ...]:
    """The layers of each model chunk by stage: True for layers with experts."""
    layout = setup.layout
    pattern = moe_layer_pattern(setup.model)
    return _kinds_of_stages(pattern, layout.chunk_layers, layout.pipeline_model_parallel_size)


@functools.lru_cache(maxsize=512)  # a search estimates the same pipelines many times
def _kinds_of_stages(
    pattern: Sequence[bool], chunk_layers: Sequence[int], stages: int
) -> tuple[tuple[tuple[bool, ...], ...], ...]:
    ends = itertools.accumulate(chunk_layers)
    chunks = [tuple(pattern[end - number : end]) for end, number in zip(ends, chunk_layers, strict=True)]
    return tuple(tuple(chunks[stage::stages]) for stage in range(stages))


def _layer_counts(setup: Setup) -> dict[bool, Counts]:
    """Parameters of a dense layer (False) and of one with experts (True), if the model has them."""
    layout = setup.layout
    expert_ranks = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
    return _counts_of_kinds(setup.model, layout.tensor_model_parallel_size, expert_ranks)


@functools.lru_cache(maxsize=64)
def _counts_of_kinds(model: ModelConfig, ranks: int, expert_ranks: int) -> dict[bool, Counts]:
    counts = {}
    for has_experts in set(moe_layer_pattern(model)):
        complete = replicated_parameter_count(model, has_experts=has_experts)
        divided = layer_parameter_count(model, has_experts=has_experts) - complete
        experts = experts_parameter_count(model) / expert_ranks if has_experts else 0.0
        counts[has_experts] = Counts(layers=complete + divided / ranks, experts=experts)
    return counts


def _tables(setup: Setup) -> list[float]:
    """Parameters before the first and after the last layer by stage, without MTP layers.

    The output layer is a copy of the embedding if they are tied. With MTP layers, the final norm follows the last layer
    (megatron/core/transformer/transformer_block.py, has_final_layernorm_in_this_stage).
    """
    model, last = setup.model, setup.layout.pipeline_model_parallel_size - 1
    table, tables = table_parameter_count(setup), [0.0] * (last + 1)
    for stage in embedding_stages(model, setup.parallelism):
        tables[stage] += table
    if model.position_embedding_type == "learned_absolute":
        assert model.max_position_embeddings
        tables[0] += model.max_position_embeddings * model.hidden_size
    if model.untie_embeddings_and_output_weights:
        tables[last] += table
    tables[_final_norm_stage(setup)] += norm_parameter_count(model)
    return tables


def _final_norm_stage(setup: Setup) -> int:
    """Pipeline stage of the final norm."""
    last = setup.layout.pipeline_model_parallel_size - 1
    return last if setup.model.mtp_num_layers is None else _last_layer_stage(setup)


def _last_layer_stage(setup: Setup) -> int:
    """Pipeline stage of the last transformer layer."""
    chunks = setup.layout.chunk_layers
    last_chunk = max(chunk for chunk, layers in enumerate(chunks) if layers)
    return last_chunk % setup.layout.pipeline_model_parallel_size


def _mtp_counts(setup: Setup) -> Counts:
    """MTP layers: each has a layer like the last one, a projection and three norms."""
    model, number = setup.model, _num_mtp(setup.model)
    if not number:
        return Counts()
    layer = _layer_counts(setup)[last_layer_has_experts(model)]
    projection = 2 * model.hidden_size**2 / setup.layout.tensor_model_parallel_size
    norms = 3 * norm_parameter_count(model)
    return layer._replace(layers=number * (layer.layers + projection + norms), experts=number * layer.experts)


def table_parameter_count(setup: Setup) -> float:
    """Parameters of the embedding or of the output layer on a device."""
    assert setup.model.padded_vocab_size
    return setup.model.padded_vocab_size * setup.model.hidden_size / setup.layout.tensor_model_parallel_size
