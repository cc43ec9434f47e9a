"""The order in which Megatron-Core's fused linear layers have the outputs of their parts.

A fused layer computes the outputs of several parts in one product (`trainer.contract.model.adapters`). linear_qkv has
the queries, the key and the value of one query group after the other. linear_fc1 of a gated MLP has the gate and then
the up projection. A tensor-parallel rank has the same order, for its own query groups or channels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainer.contract.config import ModelConfig


def join(kind: str, parts: Mapping[str, torch.Tensor], model: ModelConfig, dim: int = 0) -> torch.Tensor:
    """Put the outputs of the parts of a linear layer in the order of the fused layer.

    `kind` is the layer's name, such as linear_qkv. `dim` is the axis of the outputs: 0 for weights [outputs, inputs],
    -1 for activations. The parts may be complete, or those of a tensor-parallel rank.
    """
    tensors = list(parts.values())
    if kind != "linear_qkv":
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=dim)
    dim %= tensors[0].dim()
    groups = parts["k"].shape[dim] // _channels(model)
    blocks = [parts[name].unflatten(dim, (groups, -1)) for name in ("q", "k", "v")]
    return torch.cat(blocks, dim=dim + 1).flatten(dim, dim + 1)


def split(kind: str, fused: torch.Tensor, model: ModelConfig, dim: int = 0) -> dict[str, torch.Tensor]:
    """Take the outputs of a fused linear layer apart. The inverse of `join`."""
    dim %= fused.dim()
    if kind == "linear_qkv":
        assert model.num_query_groups
        width = _channels(model)
        queries = model.num_attention_heads // model.num_query_groups * width
        blocks = fused.unflatten(dim, (-1, queries + 2 * width)).split([queries, width, width], dim=dim + 1)
        return {name: block.flatten(dim, dim + 1) for name, block in zip("qkv", blocks, strict=True)}
    if kind == "linear_fc1" and model.swiglu:
        return dict(zip(("gate", "up"), fused.chunk(2, dim=dim), strict=True))
    return {{"linear_proj": "o", "linear_fc1": "up", "linear_fc2": "down"}[kind]: fused}


def _channels(model: ModelConfig) -> int:
    assert model.kv_channels
    return model.kv_channels
