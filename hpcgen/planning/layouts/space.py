"""The layouts that a search tries: the values of each axis, and the keys that they set.

| axis | values |
| --- | --- |
| TP | divisors of the attention heads whose groups stay inside an NVLink domain; sequence_parallel follows it |
| PP | divisors of the ranks that TP leaves; layers are divided evenly, or the embedding and the loss count as layers |
| VPP | all numbers of chunks for which this is possible |
| CP | divisors of the ranks that TP and PP leave |
| EP, ETP | divisors of the experts; 1 or TP |
| MBS | powers of two that divide the samples of a data-parallel rank |
| recompute | none, sets of modules, the first layers of each chunk, or all layers |

The rules decide which of these layouts are valid. Other keys stay as they are, so a run that sets
pipeline_model_parallel_layout keeps its PP, its VPP and its layers, and hierarchical_context_parallel_sizes allows only
their product as CP, or 1. Keys that need more than one rank on an axis return to their defaults where it has one:
tp_comm_overlap without TP, and cp_comm_type without CP.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.contract.config import ModelConfig
from trainer.contract.model.model_size import (
    expert_parameter_count,
    last_layer_has_experts,
    layer_parameter_count,
)
from trainer.contract.model.pipeline import ACCOUNTED_KEYS, LAYOUT, UNEVEN_KEYS, VPP, layout_of
from trainer.contract.rules.facts import Facts, divisors

Keys = Mapping[str, Any]
"""Values by key, such as "tensor_model_parallel_size"."""

KEYS: Mapping[str, tuple[str, ...]] = {
    "TP": (
        "parallelism.tensor_model_parallel_size",
        "parallelism.sequence_parallel",
        "parallelism.tp_comm_overlap",
    ),
    "PP": ("parallelism.pipeline_model_parallel_size", *(f"parallelism.{key}" for key in UNEVEN_KEYS)),
    "VPP": ("parallelism.virtual_pipeline_model_parallel_size",),
    "CP": (
        "parallelism.context_parallel_size",
        "parallelism.cp_comm_type",
        "parallelism.hierarchical_context_parallel_sizes",
    ),
    "EP": ("parallelism.expert_model_parallel_size",),
    "ETP": ("parallelism.expert_tensor_parallel_size",),
    "MBS": ("training.micro_batch_size",),
    "recompute": (
        "training.recompute_granularity",
        "training.recompute_modules",
        "training.recompute_method",
        "training.recompute_num_layers",
    ),
}
"""The axes of a search, and the keys that each may change."""
AXES = tuple(KEYS)


def layouts(facts: Facts, vary: Sequence[str] = AXES) -> Iterator[Facts]:
    """Yields the run with each layout, with the recomputation of the run itself. Some of them break rules."""
    for parallelism in _parallelisms(facts, vary):
        changed = dataclasses.replace(
            facts, parallelism=dataclasses.replace(facts.parallelism, **parallelism)
        )
        for size in _micro_batches(changed, vary):
            yield _with_training(changed, {"micro_batch_size": size})


def recomputed(facts: Facts, vary: Sequence[str] = AXES) -> Iterator[Facts]:
    """Yields a run with each way to recompute activations. Some of them break rules."""
    if "recompute" not in vary:
        yield facts
        return
    for training in _recomputes(facts):
        yield _with_training(facts, training)


def changes(before: Facts, after: Facts) -> dict[str, object]:
    """The keys of the axes whose values differ, with their new values."""
    paths = itertools.chain.from_iterable(KEYS.values())
    values = ((path, before.value_at(path), after.value_at(path)) for path in paths)
    return {path: new for path, old, new in values if new != old}


def _with_training(facts: Facts, keys: Keys) -> Facts:
    return dataclasses.replace(facts, training=dataclasses.replace(facts.training, **keys))


def _parallelisms(facts: Facts, vary: Sequence[str]) -> Iterator[Keys]:
    """Yields the keys of the section `parallelism` of each layout."""
    for tensor in _tensor_parallel(facts, vary):
        ranks = facts.world.size // tensor["tensor_model_parallel_size"]
        for pipeline in _pipelines(facts, ranks, vary):
            of_stage = ranks // pipeline["pipeline_model_parallel_size"]
            for context in _context_parallel(facts, of_stage, vary):
                for experts in _expert_parallel(facts, tensor["tensor_model_parallel_size"], vary):
                    yield {**tensor, **pipeline, **context, **experts}


def _tensor_parallel(facts: Facts, vary: Sequence[str]) -> Iterator[Keys]:
    own = facts.parallelism.tensor_model_parallel_size
    for size in _sizes(facts.model.num_attention_heads) if "TP" in vary else [own]:
        if facts.world.size % size == 0 and (size == own or not facts.crosses_network(size)):
            overlap = facts.parallelism.tp_comm_overlap and size > 1
            yield {
                "tensor_model_parallel_size": size,
                "sequence_parallel": size > 1,
                "tp_comm_overlap": overlap,
            }


def _pipelines(facts: Facts, ranks: int, vary: Sequence[str]) -> Iterator[Keys]:
    """Yields the keys of the pipelines on `ranks` ranks."""
    own = facts.parallelism
    if own.pipeline_model_parallel_layout is not None:
        vary = ()
    for stages in _sizes(ranks) if "PP" in vary else [own.pipeline_model_parallel_size]:
        most = max(1, math.ceil(facts.model.num_layers / stages)) if stages > 1 else 1
        for chunks in range(1, most + 1) if "VPP" in vary else [facts.num_chunks]:
            keys = {"pipeline_model_parallel_size": stages, VPP: chunks if chunks > 1 else None}
            for split in _splits(facts, stages, chunks) if "PP" in vary else [{}]:
                yield {**keys, **split}


def _splits(facts: Facts, stages: int, chunks: int) -> Iterator[Keys]:
    """Yields the keys that divide the layers over a pipeline, in which the embedding may count as a layer and the loss
    as several, so that all chunks have the same size."""
    num_layers, parts = facts.model.num_layers, stages * chunks
    splits = []
    for embedding in (0, 1) if stages > 1 else (0,):
        loss = -(num_layers + embedding) % parts
        each = (num_layers + embedding + loss) // parts
        if loss <= min(each, _layers_like_loss(facts.resolved_model)):
            splits.append((each - embedding, *(each,) * (parts - 2), each - loss) if parts > 1 else (each,))
    for layers in dict.fromkeys(splits):
        yield _split_keys(facts, stages, layers)


def _split_keys(facts: Facts, stages: int, layers: Sequence[int]) -> Keys:
    """The keys for chunks with these numbers of layers. Those of the run itself, if it has the same chunks."""
    own = facts.parallelism
    if stages == own.pipeline_model_parallel_size and tuple(layers) == facts.chunk_layers:
        return {key: getattr(own, key) for key in UNEVEN_KEYS}
    is_accounted = [layers[index] == max(layers) - 1 for index in (0, -1)]
    keys: dict[str, Any] = dict.fromkeys(UNEVEN_KEYS)
    if max(layers) - layers[-1] <= 1:
        return keys | dict(zip(ACCOUNTED_KEYS, is_accounted, strict=True))
    return (
        keys
        | dict.fromkeys(ACCOUNTED_KEYS, False)
        | {LAYOUT: layout_of(layers, facts.model.mtp_num_layers or 0)}
    )


@functools.lru_cache(maxsize=16)
def _layers_like_loss(model: ModelConfig) -> int:
    """Number of layers that take at least as long as what follows the last layer: MTP layers, and for each loss the
    logits."""
    assert model.padded_vocab_size is not None
    has_experts = last_layer_has_experts(model)
    layer = layer_parameter_count(model, has_experts=has_experts)
    if has_experts:
        layer += model.moe_router_topk * expert_parameter_count(model)
    mtp = model.mtp_num_layers or 0
    return mtp + math.ceil((1 + mtp) * model.padded_vocab_size * model.hidden_size / layer) + 1


def _context_parallel(facts: Facts, ranks: int, vary: Sequence[str]) -> Iterator[Keys]:
    """Yields the sizes that divide the ranks of a stage."""
    own = facts.parallelism
    for size in _sizes(ranks) if "CP" in vary else [own.context_parallel_size]:
        if size == 1:
            exchange = {"cp_comm_type": None, "hierarchical_context_parallel_sizes": None}
            yield {"context_parallel_size": 1, **exchange}
        else:
            yield {"context_parallel_size": size}


def _expert_parallel(facts: Facts, tensor: int, vary: Sequence[str]) -> Iterator[Keys]:
    """Yields how the ranks share the experts. A size equal to TP is left to its default, unless the run sets it."""
    own, experts = facts.parallelism, facts.model.num_moe_experts
    if experts is None:
        yield {}
        return
    tensor_sizes: list[int | None] = [own.expert_tensor_parallel_size]
    if "ETP" in vary:
        is_default = [size == tensor != own.expert_tensor_parallel_size for size in (1, tensor)]
        tensor_sizes = [
            None if default else size for size, default in zip((1, tensor), is_default, strict=True)
        ]
    for width in dict.fromkeys(tensor_sizes):
        for size in _sizes(experts) if "EP" in vary else [own.expert_model_parallel_size]:
            yield {"expert_tensor_parallel_size": width, "expert_model_parallel_size": size}


def _micro_batches(facts: Facts, vary: Sequence[str]) -> Iterator[int]:
    own, ranks = facts.training.micro_batch_size, facts.data_parallel_size
    if "MBS" not in vary:
        yield own
    elif ranks is not None and facts.training.global_batch_size % ranks == 0:
        samples = facts.training.global_batch_size // ranks
        yield from itertools.takewhile(lambda size: samples % size == 0, (2**power for power in range(64)))


SELECTIVE = (
    ("layernorm",),
    ("moe_act",),
    ("layernorm", "moe_act"),
    ("mla_up_proj",),
    ("mla_up_proj", "moe_act"),
    ("layernorm", "mla_up_proj", "moe_act"),
    ("mlp",),
    ("moe",),
)


def _recomputes(facts: Facts) -> Iterator[Keys]:
    """Yields the keys of the section `training` for each way to recompute activations."""
    none: Keys = dict.fromkeys(key.partition(".")[2] for key in KEYS["recompute"])
    yield none
    for modules in SELECTIVE:
        yield {**none, "recompute_granularity": "selective", "recompute_modules": modules}
    full = {**none, "recompute_granularity": "full"}
    smallest = min(filter(None, facts.chunk_layers or ()), default=1)
    for number in range(1, smallest):
        yield {**full, "recompute_method": "block", "recompute_num_layers": number}
    yield {**full, "recompute_method": "uniform", "recompute_num_layers": 1}


def _sizes(number: int) -> list[int]:
    """Sizes of an axis that divide `number`, in ascending order."""
    return sorted(divisors(number, near=1))
