"""Floating-point operations of a training step, by a documented formula."""

from __future__ import annotations

from trainer.contract.config import ModelConfig, TrainerConfig
from trainer.contract.experts import num_moe_layers

FORMULA = (
    "megatron-lm: 3 x forward matrix products, causal attention halved, only keys in the window, with logits, "
    "only the chosen experts, without routers and recomputation"
)


def flops_per_iteration(config: TrainerConfig) -> float:
    """Model FLOPs of one step over all ranks, with global_batch_size samples. `config` is resolved."""
    return flops_per_sample(config) * config.training.global_batch_size


def flops_per_sample(config: TrainerConfig) -> float:
    """Model FLOPs of training on one sequence. `config` is resolved.

    Source: Megatron-LM, megatron/training/training.py, num_floating_point_operations.

    Per token and layer: 2 x in x out for each matrix, and 2 x 2 x keys x width for scores and their product with the
    values, where keys is the mean number of visible keys. The backward pass costs twice the forward pass. Of the
    experts, those that a token chooses count, as if none were dropped.
    """
    model = config.model
    h, s = model.hidden_size, model.seq_length
    assert model.kv_channels
    assert model.num_query_groups
    assert model.padded_vocab_size
    query = model.kv_channels * model.num_attention_heads
    key_value = model.kv_channels * model.num_query_groups
    matrices = 3 if model.swiglu else 2
    attention = 2 * h * (query + 2 * key_value) + 2 * query * h + 4 * visible_keys(model) * query
    mlps = matrices * 2 * h * total_mlp_width(model)
    per_token = model.num_layers * attention + mlps + 2 * h * model.padded_vocab_size
    return 3.0 * per_token * s


def total_mlp_width(model: ModelConfig) -> int:
    """Width of the MLPs that process a token, over all layers of the resolved `model`."""
    assert model.ffn_hidden_size
    moe_layers = num_moe_layers(model)
    experts = model.moe_router_topk * (model.moe_ffn_hidden_size or 0)
    shared = model.moe_shared_expert_intermediate_size or 0
    return (model.num_layers - moe_layers) * model.ffn_hidden_size + moe_layers * (experts + shared)


def visible_keys(model: ModelConfig) -> float:
    """Mean number of keys that a token attends to: s / 2 for a causal mask, and w - w^2 / 2s in a window of w."""
    s = model.seq_length
    w = min(model.window_size or s, s)
    return w - w * w / (2 * s)
