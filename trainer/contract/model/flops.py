"""Floating-point operations of a training step, by a documented formula."""

from __future__ import annotations

from trainer.contract.attention import attention_of
from trainer.contract.attention.visibility import visible_pairs
from trainer.contract.config import ModelConfig, TrainerConfig
from trainer.contract.model.experts import moe_layer_pattern

FORMULA = (
    "megatron-lm: 3 x forward matrix products, causal attention halved, only keys in the window and the document, with "
    "logits, MTP layers and only the chosen experts, without routers and recomputation"
)


def flops_per_iteration(config: TrainerConfig) -> float:
    """Model FLOPs of one step over all ranks, with global_batch_size samples. `config` is resolved."""
    return flops_per_sample(config) * config.training.global_batch_size


def flops_per_sample(config: TrainerConfig) -> float:
    """Model FLOPs of training on one sequence, as if it were one document. `config` is resolved."""
    return sample_flops(config.model)


def sample_flops(model: ModelConfig) -> float:
    """Model FLOPs of training the resolved `model` on one sequence, as if it were one document."""
    return flops(model, model.seq_length, visible_pairs(model, [model.seq_length]))


def flops(model: ModelConfig, tokens: int, pairs: float) -> float:
    """Model FLOPs of training the resolved `model` on `tokens` with `pairs` of a query and a visible key.

    Source: Megatron-LM, megatron/training/training.py, num_floating_point_operations.

    Per layer: 2 x in x out for each matrix and token, and 2 x 2 x width for each pair, for its score and its product
    with the value. The backward pass costs twice the forward pass. Of the experts, those that a token chooses count, as
    if none were dropped. An MTP layer is a layer like the last one, with a projection of hidden states and embeddings
    to the hidden size, and logits of its own.
    """
    h, mtp_layers = model.hidden_size, model.mtp_num_layers or 0
    assert model.padded_vocab_size
    attention = attention_of(model)
    matrices = 3 if model.swiglu else 2
    products = sum(projection.weights for projection in attention.projections(model))
    pattern = moe_layer_pattern(model)
    layers = (*pattern, *pattern[-1:] * mtp_layers)
    mlps = sum(_mlp_width(model, has_experts) for has_experts in layers)
    logits = (1 + mtp_layers) * h * model.padded_vocab_size
    per_token = len(layers) * products + matrices * h * mlps + mtp_layers * 2 * h * h + logits
    return 3.0 * 2 * (per_token * tokens + len(layers) * attention.score_width(model) * pairs)


def _mlp_width(model: ModelConfig, has_experts: bool) -> int:
    """Width of the MLPs of a layer that process a token."""
    assert model.ffn_hidden_size
    if not has_experts:
        return model.ffn_hidden_size
    experts = model.moe_router_topk * (model.moe_ffn_hidden_size or 0)
    return experts + (model.moe_shared_expert_intermediate_size or 0)
