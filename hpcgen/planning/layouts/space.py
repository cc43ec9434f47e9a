"""The layouts that a search tries: the values of each axis, and the keys that they set.

| axis | values |
| --- | --- |
| TP | divisors of the attention heads whose groups stay inside an NVLink domain; sequence_parallel follows it |
| CP | divisors of the ranks that TP leaves; between NVLink domains only with long samples |
| EP, ETP | divisors of the experts; 1 or TP |
| MBS | powers of two that divide the samples of a data-parallel rank |
| PP | divisors of the ranks that TP and CP leave; the embedding and the loss may count as layers |
| VPP | all numbers of chunks for which this is possible |
| recompute | none, sets of modules, the first layers of each chunk, or all layers |

The rules decide which of these layouts are valid. An uneven pipeline of the run is one of the pipelines.
Other keys stay as they are, so hierarchical_context_parallel_sizes allows only their product as CP, or 1. Keys that
need more than one rank on an axis return to their defaults where it has one: tp_comm_overlap without TP, and
cp_comm_type without CP.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from trainer.contract.config import ModelConfig
from trainer.contract.config.training import RecomputeModule
from trainer.contract.model.model_size import (
    expert_parameter_count,
    last_layer_has_experts,
    layer_parameter_count,
)
from trainer.contract.model.pipeline import (
    ACCOUNTED_KEYS,
    LAYOUT,
    UNEVEN_KEYS,
    layout_of,
    uneven_keys,
)
from trainer.contract.record import replaced
from trainer.contract.rules import recompute
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
NONE: Keys = {key.partition(".")[2]: None for key in KEYS["recompute"]}
"""Without recomputation."""
LONG = 4096
"""Smallest number of tokens of a sample on a rank with which a context-parallel group may cross the network. Llama 3
405B had 8,192 of 131,072 tokens on each of 16 ranks (arXiv 2407.21783, table 4)."""
MODULES: tuple[RecomputeModule, ...] = ("layernorm", "moe_act", "mla_up_proj", "mlp", "moe")
"""Modules in the order of the time that their recomputation takes for each byte that it saves, in presets llama3-70b,
mixtral-8x7b and deepseek-v3. Fused attention keeps no scores, so core_attn saves nothing."""


class Space:
    """The layouts of a run, in which the axes `vary` have other values than those of the run."""

    def __init__(self, facts: Facts, vary: Sequence[str] = AXES) -> None:
        self._facts = facts
        self._vary = frozenset(vary)

    def layers(self) -> Iterator[Facts]:
        """Yields the run with each way to compute a microbatch of its layers: TP, CP, EP, ETP and MBS. The pipeline is
        that of the run."""
        facts = self._facts
        sizes = _micro_batches(facts) if "MBS" in self._vary else [facts.training.micro_batch_size]
        for keys in self._layers():
            changed = facts.changed(parallelism=replaced(facts.parallelism, **keys))
            for size in sizes:
                yield _with_training(changed, {"micro_batch_size": size})

    def pipelines(self, layers: Facts, but_not: Container[int] = ()) -> Iterator[Facts]:
        """Yields a run of `layers` with each pipeline, except for the numbers of stages `but_not`. Some break rules."""
        axes, training = layers.parallelism, layers.training
        ranks = layers.world.size // (axes.tensor_model_parallel_size * axes.context_parallel_size)
        samples = training.global_batch_size // training.micro_batch_size
        for keys in self._pipelines:
            stages = keys["pipeline_model_parallel_size"]
            replicas, ranks_left = divmod(ranks, stages)
            if replicas and ranks_left == 0 and samples % replicas == 0 and stages not in but_not:
                yield layers.changed(parallelism=replaced(axes, **keys))

    def without_recomputation(self, facts: Facts) -> Facts:
        """A run that recomputes nothing, or what the run of the space does if recomputation is not varied."""
        return _with_training(facts, NONE) if "recompute" in self._vary else facts

    def recomputed(self, facts: Facts) -> list[list[Facts]]:
        """A run with each kind of recomputation, in ascending order of what it recomputes."""
        if "recompute" not in self._vary:
            return []
        modules = [
            {"recompute_granularity": "selective", "recompute_modules": each} for each in self._modules
        ]
        full = {"recompute_granularity": "full"}
        smallest = min(filter(None, facts.chunk_layers or ()), default=1)
        blocks: list[Keys] = [
            {**full, "recompute_method": "block", "recompute_num_layers": number}
            for number in range(1, smallest)
        ]
        layers = [*blocks, {**full, "recompute_method": "uniform", "recompute_num_layers": 1}]
        return [[_with_training(facts, {**NONE, **keys}) for keys in kind] for kind in (modules, layers)]

    def _layers(self) -> Iterator[Keys]:
        for tensor in self._tensor_parallel():
            for context in self._context_parallel(tensor["tensor_model_parallel_size"]):
                for experts in self._expert_parallel(tensor["tensor_model_parallel_size"]):
                    yield {**tensor, **context, **experts}

    def _tensor_parallel(self) -> Iterator[Keys]:
        facts, own = self._facts, self._facts.parallelism
        if "TP" not in self._vary:
            yield {"tensor_model_parallel_size": own.tensor_model_parallel_size}
            return
        for size in _sizes(facts.model.num_attention_heads):
            if facts.world.size % size == 0 and not facts.crosses_network(size):
                overlap = own.tp_comm_overlap and size > 1
                yield {
                    "tensor_model_parallel_size": size,
                    "sequence_parallel": size > 1,
                    "tp_comm_overlap": overlap,
                }

    def _context_parallel(self, tensor: int) -> Iterator[Keys]:
        """Yields the sizes that divide the ranks that TP leaves. Groups that cross the network need long samples."""
        facts, ranks = self._facts, self._facts.world.size // tensor
        if "CP" not in self._vary:
            yield {}
            return
        for size in _sizes(ranks):
            if size == 1:
                exchange = {"cp_comm_type": None, "hierarchical_context_parallel_sizes": None}
                yield {"context_parallel_size": 1, **exchange}
            elif not facts.crosses_network(tensor * size) or facts.model.seq_length >= size * LONG:
                yield {"context_parallel_size": size}

    def _expert_parallel(self, tensor: int) -> Iterator[Keys]:
        """Yields how the ranks share the experts. A size equal to TP is left to its default, unless the run sets it."""
        own, experts = self._facts.parallelism, self._facts.model.num_moe_experts
        if experts is None:
            yield {}
            return
        widths = [own.expert_tensor_parallel_size]
        if "ETP" in self._vary:
            is_default = [size == tensor != own.expert_tensor_parallel_size for size in (1, tensor)]
            widths = [
                None if default else size for size, default in zip((1, tensor), is_default, strict=True)
            ]
        for width in dict.fromkeys(widths):
            for size in _sizes(experts) if "EP" in self._vary else [own.expert_model_parallel_size]:
                yield {"expert_tensor_parallel_size": width, "expert_model_parallel_size": size}

    @cached_property
    def _pipelines(self) -> list[Keys]:
        """The keys of all pipelines."""
        facts, own = self._facts, self._facts.parallelism
        has_layout = own.pipeline_model_parallel_layout is not None
        vary = frozenset() if has_layout and "PP" not in self._vary else self._vary
        found: list[Keys] = []
        for stages in _sizes(facts.world.size) if "PP" in vary else [own.pipeline_model_parallel_size]:
            most = math.ceil(facts.model.num_layers / stages) if stages > 1 else 1
            for chunks in range(1, most + 1) if "VPP" in vary else [facts.parallelism.num_chunks]:
                keys: Keys = {
                    "pipeline_model_parallel_size": stages,
                    "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
                }
                splits = _splits(facts, stages, chunks) if "PP" in vary else [{}]
                found += [{**keys, **split} for split in splits]
        if uneven_keys(own) and "PP" in vary:  # its chunks may differ from those above
            axes = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
            own_keys = {key: getattr(own, key) for key in (*axes, *UNEVEN_KEYS)}
            found += [own_keys] if own_keys not in found else []
        return found

    @cached_property
    def _modules(self) -> list[tuple[RecomputeModule, ...]]:
        """Sets of modules to recompute. Each has one more, and experts include their activation function."""
        sets: list[tuple[RecomputeModule, ...]] = [()]
        for module in MODULES:
            alone = {**NONE, "recompute_granularity": "selective", "recompute_modules": (module,)}
            changed = _with_training(self._facts, alone)
            is_useful = module != "mlp" or self._facts.has_dense_layers
            if is_useful and not any(True for rule in recompute.RULES for _ in rule(changed)):
                sets.append((*(other for other in sets[-1] if (other, module) != ("moe_act", "moe")), module))
        return sets[1:]


def changes(before: Facts, after: Facts) -> dict[str, object]:
    """The keys of the axes whose values differ, with their new values."""
    paths = itertools.chain.from_iterable(KEYS.values())
    values = ((path, before.value_at(path), after.value_at(path)) for path in paths)
    return {path: new for path, old, new in values if new != old}


def _with_training(facts: Facts, keys: Keys) -> Facts:
    return facts.changed(training=replaced(facts.training, **keys))


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
    keys |= dict.fromkeys(ACCOUNTED_KEYS, False)
    return keys | {LAYOUT: layout_of(layers, facts.model.mtp_num_layers or 0)}


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


def _micro_batches(facts: Facts) -> list[int]:
    batch = facts.training.global_batch_size
    return [*itertools.takewhile(lambda size: batch % size == 0, (2**power for power in range(64)))]


def _sizes(number: int) -> list[int]:
    """Sizes of an axis that divide `number`, in ascending order."""
    return sorted(divisors(number, near=1))
