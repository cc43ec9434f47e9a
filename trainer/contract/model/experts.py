"""Mixtures of experts: defaults of their keys, and the layers that have experts."""

from __future__ import annotations

import dataclasses

from trainer.contract.config import ModelConfig, ParallelismConfig

MODEL_KEYS = tuple(field.name for field in dataclasses.fields(ModelConfig) if field.name.startswith("moe_"))
"""Keys of the section `model` that need num_moe_experts."""


def default_width(model: ModelConfig, ffn_hidden_size: int) -> int | None:
    """Width of an expert: `ffn_hidden_size` unless it is set; None for a dense model."""
    return model.moe_ffn_hidden_size or (ffn_hidden_size if model.num_moe_experts is not None else None)


def expert_tensor_parallel_size(parallelism: ParallelismConfig) -> int:
    """Number of ranks that share each expert: TP unless it is set (megatron/core/parallel_state.py)."""
    return parallelism.expert_tensor_parallel_size or parallelism.tensor_model_parallel_size


def moe_layer_pattern(model: ModelConfig) -> tuple[bool, ...]:
    """For each layer, True if the layer has experts and False if it is dense. MTP layers are like the last layer."""
    if model.num_moe_experts is None or model.moe_layer_freq is None:
        return (model.num_moe_experts is not None,) * model.num_layers
    return tuple(map(bool, model.moe_layer_freq))


def num_moe_layers(model: ModelConfig) -> int:
    """Number of layers with experts, without MTP layers."""
    return sum(moe_layer_pattern(model))


def core_moe_layer_freq(model: ModelConfig) -> int | list[int]:
    """Megatron-Core's `moe_layer_freq` for a model with experts: 1 if all layers have them, and else a list.

    With a list, Core stores each layer under its own number instead of stacking all of them.
    """
    pattern = moe_layer_pattern(model)
    return 1 if all(pattern) else list(map(int, pattern))
