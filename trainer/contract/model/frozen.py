"""Shares of a model that training.freeze leaves untrained, from which memory and FLOPs follow."""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from trainer.contract.attention import attention_of
from trainer.contract.config import ModelConfig
from trainer.contract.model.model_size import parameter_names

EMBEDDING, POSITIONS, OUTPUT = (
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "output_layer.weight",
)


class Frozen(NamedTuple):
    """Numbers of frozen parameters in the complete model."""

    embedding: int
    """Word embeddings. Tied ones are also the output layer."""
    positions: int
    output: int
    """An output layer that is not tied."""
    final_norm: int
    layers: tuple[int, ...]
    """By layer, without routed experts. MTP layers follow the others."""
    experts: tuple[int, ...]
    """Routed experts by layer, in the same order."""
    matrices: tuple[int, ...]
    """Weights of the matrix products that process a token, by layer: of a layer's experts, those of the chosen ones."""
    has_trained: tuple[bool, ...]
    """By layer: True if something in the layer is trained."""


def is_frozen(name: str, patterns: Iterable[str]) -> bool:
    """True if one of the `patterns` in training.freeze matches the global name of a parameter."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@functools.lru_cache(maxsize=64)
def frozen(model: ModelConfig, patterns: tuple[str, ...], *, transformer_engine: bool = False) -> Frozen:
    """The frozen parameters of the resolved `model`, with the names of Transformer Engine's layers or of Core's."""
    numbers: dict[str, int] = defaultdict(int)
    num_layers = model.num_layers + (model.mtp_num_layers or 0)
    layers, experts, matrices = ([0] * num_layers for _ in range(3))
    has_trained = [False] * num_layers
    for name in parameter_names(model, transformer_engine=transformer_engine):
        layer, part = _split(name, model.num_layers)
        stays = is_frozen(name, patterns)
        if layer is None:
            numbers[name] += _size(model, name) * stays
            continue
        has_trained[layer] |= not stays
        if stays:
            size = _size_in_layer(model, part)
            (experts if ".experts." in part else layers)[layer] += size
            if _is_matrix(part):
                share = model.moe_router_topk / (model.num_moe_experts or 1) if ".experts." in part else 1
                matrices[layer] += int(size * share)
    final_norm = sum(size for name, size in numbers.items() if name.startswith("decoder.final"))
    return Frozen(
        numbers[EMBEDDING],
        numbers[POSITIONS],
        numbers[OUTPUT],
        final_norm,
        tuple(layers),
        tuple(experts),
        tuple(matrices),
        tuple(has_trained),
    )


def layers_without_gradients(model: ModelConfig, found: Frozen, has_trained: Sequence[bool]) -> int:
    """Number of first layers that the backward pass does not reach, since neither they nor the embeddings are trained.

    `has_trained` has a value for each layer: whether something in it is trained.
    """
    assert model.padded_vocab_size
    is_learned = model.position_embedding_type == "learned_absolute"
    positions = (model.max_position_embeddings or 0) * model.hidden_size if is_learned else 0
    if found.embedding < model.padded_vocab_size * model.hidden_size or found.positions < positions:
        return 0
    return len(list(itertools.takewhile(operator.not_, has_trained)))


def _split(name: str, num_layers: int) -> tuple[int | None, str]:
    """The layer of a parameter, None if it is outside of all layers, and its name in the layer."""
    if found := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name):
        return int(found[1]), found[2]
    if found := re.fullmatch(r"mtp\.layers\.(\d+)\.(?:transformer_layer\.)?(.*)", name):
        return num_layers + int(found[1]), found[2]
    return None, name


def _size(model: ModelConfig, name: str) -> int:
    """Number of parameters outside of layers."""
    assert model.padded_vocab_size
    if name in (EMBEDDING, OUTPUT):
        return model.padded_vocab_size * model.hidden_size
    return model.hidden_size * ((model.max_position_embeddings or 0) if name == POSITIONS else 1)


def _size_in_layer(model: ModelConfig, part: str) -> int:
    """Number of parameters in a layer, by their name in it."""
    module, _, kind = part.rpartition(".")
    kind = kind.rstrip("0123456789")
    name = module.removeprefix("self_attention.")
    attention = attention_of(model)
    products = {product.name: product for product in attention.projections(model)}
    if kind.startswith("layer_norm_"):
        return products[name].inputs if name in products else model.hidden_size
    if name in products:
        return products[name].weights if kind == "weight" else products[name].outputs
    if name == "eh_proj":
        return 2 * model.hidden_size**2
    if name == "mlp.router":
        return (model.num_moe_experts or 0) * (model.hidden_size if kind == "weight" else 1)
    if name.startswith("mlp."):
        return _size_in_mlp(model, module, kind)
    return attention.norms(model).get(name, model.hidden_size)


def _size_in_mlp(model: ModelConfig, module: str, kind: str) -> int:
    width = model.ffn_hidden_size
    if ".shared_experts." in module:
        width = model.moe_shared_expert_intermediate_size
    elif ".experts." in module:
        width = model.moe_ffn_hidden_size
    assert width
    if module.endswith("linear_fc2"):
        return model.hidden_size * (width if kind == "weight" else 1)
    return (2 if model.swiglu else 1) * width * (model.hidden_size if kind == "weight" else 1)


def _is_matrix(part: str) -> bool:
    """True for a weight that the formula of FLOPs counts."""
    module, _, kind = part.rpartition(".")
    is_product = module.rpartition(".")[2].startswith("linear_") or module == "eh_proj"
    return is_product and kind.rstrip("0123456789") == "weight"
