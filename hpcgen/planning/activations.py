"""Activation bytes of one layer, for one token on one device in bf16.

The terms are those of Korthikanti et al., "Reducing activation recomputation in large transformer models", arXiv
2205.05198, section 4, with separate terms to cover grouped queries, gated MLPs, latent attention and experts. For GPT-3
shapes with dropout they sum to the paper's h x (10 + 24 / TP). Attention is assumed to be fused, so its score matrix is
never stored. In FP8 some inputs take one byte in place of two; the estimate uses the bf16 sizes. Experts are assumed to
have equal loads.
"""

from __future__ import annotations

from hpcgen.planning.layout import Layout
from trainer.contract.config import ModelConfig, ParallelismConfig, TrainingConfig
from trainer.contract.latent_attention import latent_width, value_width

ROUTER_BYTES = 12
"""Logits, scores and weights of each expert in fp32."""


def layer_activation_bytes(
    model: ModelConfig,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    layout: Layout,
    *,
    has_experts: bool,
) -> float:
    """Bytes that a layer keeps for the backward pass, without what selective recomputation computes again."""
    needed = _needed_bytes(model, parallelism, layout, has_experts=has_experts)
    return needed - recomputed_bytes(model, parallelism, training, layout, has_experts=has_experts)


def _needed_bytes(
    model: ModelConfig, parallelism: ParallelismConfig, layout: Layout, *, has_experts: bool
) -> float:
    """Bytes that the backward pass of a layer needs."""
    # inputs of both norms, the QKV projection and the MLP, and a one-byte mask per residual dropout
    outside = model.hidden_size * (8 + (2 if model.hidden_dropout else 0))
    outside += 2 * latent_width(model)
    if model.qk_layernorm and model.multi_latent_attention:  # the inputs of these norms
        outside += 2 * latent_width(model)
    inside = _attention_bytes(model) / layout.tensor_model_parallel_size
    inside += _experts_bytes(model, layout) if has_experts else _dense_mlp_bytes(model, layout)
    return sharded(outside, parallelism) + inside


def recomputed_bytes(
    model: ModelConfig,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    layout: Layout,
    *,
    has_experts: bool,
) -> float:
    """Bytes of a layer that selective recomputation does not keep.

    The estimate assumes fused attention, whose recomputation stores nothing less. Sources: transformer_layer.py,
    multi_latent_attention.py, moe/moe_layer.py and moe/experts.py in megatron/core/transformer.
    """
    if training.recompute_granularity != "selective":
        return 0.0
    modules, hidden = training.recompute_modules or (), 2 * model.hidden_size
    size = 0.0
    if has_experts and "moe" in modules:  # it keeps its input
        size += _experts_bytes(model, layout)
    elif has_experts and "moe_act" in modules:
        assert model.moe_ffn_hidden_size
        width = model.moe_ffn_hidden_size / layout.expert_tensor_parallel_size
        size += _received_copies(model, layout) * 2 * width
    elif not has_experts and "mlp" in modules:
        size += _dense_mlp_bytes(model, layout)
        # Transformer Engine's MLP keeps the input of its norm, which the layer keeps anyway.
        if training.transformer_impl != "torch":
            size += sharded(hidden, parallelism)
    if model.multi_latent_attention and "mla_up_proj" in modules:  # it keeps the latents
        size += _query_key_value_bytes(model) / layout.tensor_model_parallel_size
        size += sharded(2 * latent_width(model), parallelism) if model.qk_layernorm else 0
    if "layernorm" in modules:  # outputs of norms that are not computed inside a projection
        size += sharded(hidden * (model.multi_latent_attention + has_experts), parallelism)
    return size


def sharded(size: float, parallelism: ParallelismConfig) -> float:
    """`size` on one tensor-parallel rank, for activations that only sequence parallelism divides."""
    return size / parallelism.tensor_model_parallel_size if parallelism.sequence_parallel else size


def _attention_bytes(model: ModelConfig) -> int:
    """Queries, keys, values and the output of the attention, and queries and keys before their norms."""
    assert model.kv_channels
    assert model.num_query_groups
    output = 2 * value_width(model) * model.num_attention_heads
    size = _query_key_value_bytes(model) + output
    if model.qk_layernorm and not model.multi_latent_attention:
        size += 2 * model.kv_channels * (model.num_attention_heads + model.num_query_groups)
    return size


def _query_key_value_bytes(model: ModelConfig) -> int:
    assert model.kv_channels
    assert model.num_query_groups
    queries = model.num_attention_heads * model.kv_channels
    return 2 * (queries + model.num_query_groups * (model.kv_channels + value_width(model)))


def _dense_mlp_bytes(model: ModelConfig, layout: Layout) -> float:
    assert model.ffn_hidden_size
    return _mlp_bytes(model, model.ffn_hidden_size) / layout.tensor_model_parallel_size


def _experts_bytes(model: ModelConfig, layout: Layout) -> float:
    """The router, the routed and the shared experts."""
    assert model.num_moe_experts
    assert model.moe_ffn_hidden_size
    inside = _mlp_bytes(model, model.moe_ffn_hidden_size) / layout.expert_tensor_parallel_size
    outside = ROUTER_BYTES * model.num_moe_experts
    if model.moe_shared_expert_intermediate_size is not None:
        outside += _mlp_bytes(model, model.moe_shared_expert_intermediate_size)
    routed = _received_copies(model, layout) * (2 * model.hidden_size + inside)
    return outside / layout.tensor_model_parallel_size + routed


def _received_copies(model: ModelConfig, layout: Layout) -> float:
    """Copies of tokens that the experts of a device receive, per token of the sequence.

    A tensor-parallel rank sends its share of the tokens to moe_router_topk experts each. The ranks of an expert
    receive all its tokens (megatron/core/transformer/moe/token_dispatcher.py), and divide its width.
    """
    copies: float = model.moe_router_topk
    if (capacity := model.moe_expert_capacity_factor) is not None:
        copies *= capacity if model.moe_pad_expert_input_to_capacity else min(1.0, capacity)
    return copies * layout.expert_tensor_parallel_size / layout.tensor_model_parallel_size


def _mlp_bytes(model: ModelConfig, width: int) -> int:
    """The MLP before and after its activation function."""
    return 2 * width * (3 if model.swiglu else 2)
