"""Sizes that follow from the shape of a model: number and names of parameters, and the bytes of a checkpoint."""

from __future__ import annotations

from trainer.contract.config import ModelConfig

CHECKPOINT_BYTES_PER_PARAMETER = {"bf16": 14, "fp16": 14, "fp32": 16}
"""Weights (2 or 4 bytes), and the optimizer's fp32 copy and two moments (4 bytes each)."""


def parameter_count(model: ModelConfig) -> int:
    """Number of trainable parameters of the resolved `model`, identical to Megatron-Core's GPTModel."""
    assert model.max_position_embeddings
    assert model.padded_vocab_size
    num_tables = 2 if model.untie_embeddings_and_output_weights else 1
    positions = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0
    embedding = (num_tables * model.padded_vocab_size + positions) * model.hidden_size
    return embedding + model.num_layers * layer_parameter_count(model) + _norm_parameter_count(model)


def layer_parameter_count(model: ModelConfig) -> int:
    """Number of parameters in one transformer layer of the resolved `model`."""
    assert model.kv_channels
    assert model.num_query_groups
    assert model.ffn_hidden_size
    query_size = model.kv_channels * model.num_attention_heads
    qkv_size = query_size + 2 * model.kv_channels * model.num_query_groups
    fc1_size = model.ffn_hidden_size * (2 if model.swiglu else 1)
    weights = model.hidden_size * (qkv_size + query_size + fc1_size + model.ffn_hidden_size)
    biases = fc1_size + 2 * model.hidden_size if model.add_bias_linear else 0
    biases += qkv_size if model.add_qkv_bias else 0
    norms = 2 * _norm_parameter_count(model)
    if model.qk_layernorm:
        norms += 2 * model.kv_channels * len(_norm_parameters(model))
    return weights + biases + norms


def _norm_parameter_count(model: ModelConfig) -> int:
    return model.hidden_size * len(_norm_parameters(model))


def _norm_parameters(model: ModelConfig) -> tuple[str, ...]:
    return ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",)


def checkpoint_bytes(model: ModelConfig, precision: str) -> int:
    """Size of one checkpoint of the resolved `model` in bytes: weights and optimizer state."""
    return CHECKPOINT_BYTES_PER_PARAMETER[precision] * parameter_count(model)


def parameter_names(model: ModelConfig, *, transformer_engine: bool = False) -> list[str]:
    """Parameter names of the resolved `model` in Megatron-Core's GPTModel, unsharded.

    Transformer Engine's layers fuse a norm with the matrix product that follows it.
    """
    biases = ("bias",) if model.add_bias_linear else ()
    qkv_biases = ("bias",) if model.add_qkv_bias else ()
    norm = _norm_parameters(model)
    modules = {"self_attention.linear_proj": ("weight", *biases), "mlp.linear_fc2": ("weight", *biases)}
    if model.qk_layernorm:
        modules |= {"self_attention.q_layernorm": norm, "self_attention.k_layernorm": norm}
    for product, own_norm, its_biases in (
        ("self_attention.linear_qkv", "input_layernorm", qkv_biases),
        ("mlp.linear_fc1", "pre_mlp_layernorm", biases),
    ):
        if transformer_engine:
            modules[product] = ("weight", *its_biases, *(f"layer_norm_{name}" for name in norm))
        else:
            modules[product] = ("weight", *its_biases)
            modules[own_norm] = norm
    layer = [f"{module}.{name}" for module, names in modules.items() for name in names]
    names = ["embedding.word_embeddings.weight"]
    if model.position_embedding_type == "learned_absolute":
        names.append("embedding.position_embeddings.weight")
    names += [f"decoder.layers.{number}.{name}" for number in range(model.num_layers) for name in layer]
    names += [f"decoder.final_layernorm.{name}" for name in norm]
    if model.untie_embeddings_and_output_weights:
        names.append("output_layer.weight")
    return names
