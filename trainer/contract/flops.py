"""Floating-point operations of a training step, by a documented formula."""

from __future__ import annotations

from trainer.contract.config import ModelConfig, TrainerConfig
from trainer.contract.experts import num_moe_layers
from trainer.contract.latent_attention import projections, value_width

FORMULA = (
    "megatron-lm: 3 x forward matrix products, causal attention halved, only keys in the window, with logits, "
    "MTP layers and only the chosen experts, without routers and recomputation"
)


def flops_per_iteration(config: TrainerConfig) -> float:
    """Model FLOPs of one step over all ranks, with global_batch_size samples. `config` is resolved."""
    return flops_per_sample(config) * config.training.global_batch_size


def flops_per_sample(config: TrainerConfig) -> float:
    """Model FLOPs of training on one sequence. `config` is resolved.

    Source: Megatron-LM, megatron/training/training.py, num_floating_point_operations.

    Per token and layer: 2 x in x out for each matrix, and 2 x 2 x keys x width for scores and their product with the
    values, where keys is the mean number of visible keys. The backward pass costs twice the forward pass. Of the
    experts, those that a token chooses count, as if none were dropped. An MTP layer is a layer like the last one, with
    a projection of hidden states and embeddings to the hidden size, and logits of its own.
    """
    model = config.model
    h, s = model.hidden_size, model.seq_length
    assert model.kv_channels
    assert model.padded_vocab_size
    scores_and_values = model.num_attention_heads * (model.kv_channels + value_width(model))
    matrices = 3 if model.swiglu else 2
    products = sum(rows * columns for rows, columns in projections(model))
    attention = 2 * products + 2 * visible_keys(model) * scores_and_values
    logits = 2 * h * model.padded_vocab_size
    per_token = model.num_layers * attention + matrices * 2 * h * total_mlp_width(model) + logits
    if model.mtp_num_layers is not None:
        mlp = matrices * 2 * h * mlp_width(model, model.num_layers - 1)
        per_token += model.mtp_num_layers * (2 * 2 * h * h + attention + mlp + logits)
    return 3.0 * per_token * s


def total_mlp_width(model: ModelConfig) -> int:
    """Width of the MLPs that process a token, over all layers of the resolved `model`."""
    return sum(mlp_width(model, layer) for layer in range(model.num_layers))


def mlp_width(model: ModelConfig, layer: int) -> int:
    """Width of the MLPs of a layer that process a token."""
    assert model.ffn_hidden_size
    if not num_moe_layers(model, range(layer, layer + 1)):
        return model.ffn_hidden_size
    experts = model.moe_router_topk * (model.moe_ffn_hidden_size or 0)
    return experts + (model.moe_shared_expert_intermediate_size or 0)


def visible_keys(model: ModelConfig) -> float:
    """Mean number of keys that a token attends to: s / 2 for a causal mask, and w - w^2 / 2s in a window of w."""
    s = model.seq_length
    w = min(model.window_size or s, s)
    return w - w * w / (2 * s)
