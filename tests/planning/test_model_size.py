"""Sizes against numbers that real models showed."""

from __future__ import annotations

import dataclasses

import pytest

from hpcgen.planning.checkpointing import checkpoint_bytes
from tests.planning.cases import trainer_of
from trainer.contract.config import (
    ModelConfig,
)
from trainer.contract.config.resolve import resolve_model
from trainer.contract.model.flops import flops_per_iteration
from trainer.contract.model.model_size import (
    active_parameter_count,
    parameter_count,
    parameter_names,
)


def gpt3(num_layers: int, hidden_size: int, num_attention_heads: int) -> ModelConfig:
    return resolve_model(
        ModelConfig(
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_attention_heads=num_attention_heads,
            seq_length=2048,
            vocab_size=50257,
        )
    )


def llama3_8b(num_layers: int, seq_length: int = 4096) -> ModelConfig:
    return resolve_model(
        ModelConfig(
            num_layers=num_layers,
            hidden_size=4096,
            num_attention_heads=32,
            num_query_groups=8,
            ffn_hidden_size=14336,
            seq_length=seq_length,
            position_embedding_type="rope",
            normalization="RMSNorm",
            swiglu=True,
            add_bias_linear=False,
            untie_embeddings_and_output_weights=True,
            vocab_size=128256,
        )
    )


def published(**model: object) -> ModelConfig:
    """A model whose embedding has as many rows as its vocabulary, as those on Hugging Face."""
    return resolve_model(ModelConfig(seq_length=4096, padded_vocab_size=model["vocab_size"], **model))


QWEN = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
}
DEEPSEEK_V3 = published(
    **QWEN,
    num_layers=61,
    hidden_size=7168,
    num_attention_heads=128,
    ffn_hidden_size=18432,
    multi_latent_attention=True,
    qk_layernorm=True,
    q_lora_rank=1536,
    num_moe_experts=256,
    moe_layer_freq=(0,) * 3 + (1,) * 58,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_router_topk=8,
    untie_embeddings_and_output_weights=True,
    vocab_size=129280,
)
GPT2 = published(
    num_layers=12,
    hidden_size=768,
    num_attention_heads=12,
    max_position_embeddings=1024,
    vocab_size=50257,
)
QWEN2_HALF_B = published(
    **QWEN,
    num_layers=24,
    hidden_size=896,
    num_attention_heads=14,
    num_query_groups=2,
    ffn_hidden_size=4864,
    add_qkv_bias=True,
    vocab_size=151936,
)
QWEN3_8B = published(
    **QWEN,
    num_layers=36,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=12288,
    qk_layernorm=True,
    untie_embeddings_and_output_weights=True,
    vocab_size=151936,
)


MIXTRAL_8X7B = published(
    **QWEN,
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    num_moe_experts=8,
    moe_router_topk=2,
    untie_embeddings_and_output_weights=True,
    vocab_size=32000,
)
QWEN3_30B_A3B = published(
    **QWEN,
    num_layers=48,
    hidden_size=2048,
    num_attention_heads=32,
    num_query_groups=4,
    kv_channels=128,
    qk_layernorm=True,
    num_moe_experts=128,
    moe_router_topk=8,
    moe_ffn_hidden_size=768,
    untie_embeddings_and_output_weights=True,
    vocab_size=151936,
)
QWEN2_57B_A14B = published(
    **QWEN,
    num_layers=28,
    hidden_size=3584,
    num_attention_heads=28,
    num_query_groups=4,
    add_qkv_bias=True,
    num_moe_experts=64,
    moe_router_topk=8,
    moe_ffn_hidden_size=2560,
    moe_shared_expert_intermediate_size=20480,
    untie_embeddings_and_output_weights=True,
    vocab_size=151936,
)
SHARED_EXPERT_GATES = 28 * 3584
"""Weights of Qwen2's gates of shared experts, which hpcgen does not have."""


@pytest.mark.parametrize(
    ("model", "parameters", "active"),
    [
        (MIXTRAL_8X7B, 46_702_792_704, 12_879_925_248),
        (QWEN3_30B_A3B, 30_532_122_624, 3_353_032_704),
        (QWEN2_57B_A14B, 57_408_658_944 - SHARED_EXPERT_GATES, 14_249_170_432),
    ],
)
def test_parameters_of_published_mixtures_of_experts(model, parameters, active):
    """The totals are those that transformers builds from the published configurations."""
    assert (parameter_count(model), active_parameter_count(model)) == (parameters, active)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (GPT2, 124_439_808),
        (QWEN2_HALF_B, 494_032_768),
        (QWEN3_8B, 8_190_735_360),
        (gpt3(24, 2048, 16), 1_315_819_520),
        (llama3_8b(8), 2_795_573_248),
        (llama3_8b(16), 4_540_469_248),
        (llama3_8b(32), 8_030_261_248),  # as published for Llama 3 8B
    ],
)
def test_parameters_are_those_of_the_built_model(model, parameters):
    assert parameter_count(model) == parameters


def test_gpt3_175b_has_its_name():
    assert parameter_count(gpt3(96, 12288, 96)) == pytest.approx(174.6e9, rel=1e-3)


def test_a_175b_checkpoint_takes_2_4_terabytes():
    assert checkpoint_bytes(trainer_of(gpt3(96, 12288, 96), precision="bf16")) == pytest.approx(
        2.44e12, rel=2e-3
    )


def test_fp32_checkpoints_hold_the_weights_twice():
    model = gpt3(24, 2048, 16)
    assert checkpoint_bytes(trainer_of(model, precision="fp32")) == 16 * parameter_count(model)


def flops_per_token(model: ModelConfig) -> float:
    return flops_per_iteration(trainer_of(model)) / model.seq_length


def test_flops_are_those_of_the_paper():
    """arXiv 2104.04473, equation 3, without recomputation (x 3/4) and with the causal half of attention."""
    model = gpt3(96, 12288, 96)
    layers, hidden, seq, vocab = (
        model.num_layers,
        model.hidden_size,
        model.seq_length,
        model.padded_vocab_size,
    )
    paper = 72 * layers * hidden**2 * (1 + seq / (12 * hidden) + vocab / (12 * layers * hidden))
    assert flops_per_token(model) == pytest.approx(paper, rel=1e-12)


def test_flops_of_a_window_count_its_keys():
    """The triangle before the first complete window, and the windows after it."""
    full, sliding = llama3_8b(8), dataclasses.replace(llama3_8b(8), window_size=1024)
    pairs = 1024 * 1024 / 2 + (4096 - 1024) * 1024
    saved = 4096 * 4096 / 2 - pairs
    operations = 3 * 4 * saved * 4096 * 8
    assert (flops_per_token(full) - flops_per_token(sliding)) * 4096 == pytest.approx(operations)
    longer = dataclasses.replace(full, window_size=8192)
    assert flops_per_token(longer) == flops_per_token(full)


def test_flops_of_grouped_queries_and_gated_mlps():
    """Six operations per token and matrix weight, and the core attention."""
    model = llama3_8b(8)
    table, norms = 128256 * 4096, (2 * 8 + 1) * 4096
    weights = parameter_count(model) - table - norms
    assert flops_per_token(model) == 6 * weights + 6 * 8 * 4096 * 4096


def test_flops_of_experts_are_those_of_active_weights():
    """Six operations per token and weight that processes it, without the router (as Megatron-LM), and attention."""
    model = QWEN2_57B_A14B
    table, norms, routers = 151936 * 3584, (2 * 28 + 1) * 3584, 28 * 64 * 3584
    qkv_biases = 28 * (3584 + 2 * 4 * 128)
    weights = active_parameter_count(model) - table - norms - routers - qkv_biases
    assert flops_per_token(model) == pytest.approx(6 * weights + 6 * 28 * 4096 * 3584, rel=1e-12)


def test_layers_without_experts_are_dense():
    dense_first = dataclasses.replace(MIXTRAL_8X7B, moe_layer_freq=(0, *(1,) * 31))
    missing = 7 * 3 * 4096 * 14336 + 8 * 4096
    assert parameter_count(MIXTRAL_8X7B) - parameter_count(dense_first) == missing
    names = parameter_names(dense_first)
    assert "decoder.layers.0.mlp.linear_fc1.weight" in names
    assert "decoder.layers.1.mlp.experts.local_experts.7.linear_fc2.weight" in names
    assert "decoder.layers.1.mlp.linear_fc1.weight" not in names


def test_deepseek_v3_has_its_published_sizes():
    """arXiv 2412.19437, section 4.2; the checkpoint also has a bias for each of its experts, which is not trained."""
    assert parameter_count(DEEPSEEK_V3) == 671_026_419_200 - 58 * 256
    assert active_parameter_count(DEEPSEEK_V3) == pytest.approx(37e9, rel=0.02)
    with_mtp = dataclasses.replace(DEEPSEEK_V3, mtp_num_layers=1)
    assert parameter_count(with_mtp) - parameter_count(DEEPSEEK_V3) == pytest.approx(11.5e9, rel=0.01)


def test_flops_of_latent_attention_and_mtp_are_those_of_megatron_lm():
    """num_floating_point_operations, for a sequence of 4096 tokens and without its terms for norms."""
    queries = 1536 * (7168 + 128 * 192)
    keys_and_values = 512 * (7168 + 128 * 256) + 7168 * 64
    output = 128 * 128 * 7168
    scores_and_values = 4096 * 128 * (192 + 128) / 2
    attention = 6 * (queries + keys_and_values + output + scores_and_values)
    dense, chosen = 6 * 3 * 7168 * 18432, 6 * 3 * 7168 * 9 * 2048
    logits = 6 * 7168 * 129280
    total = 61 * attention + 3 * dense + 58 * chosen + logits
    assert flops_per_token(DEEPSEEK_V3) == pytest.approx(total, rel=1e-12)
    mtp = 6 * 2 * 7168 * 7168 + attention + chosen + logits
    with_mtp = dataclasses.replace(DEEPSEEK_V3, mtp_num_layers=1)
    assert flops_per_token(with_mtp) == pytest.approx(total + mtp, rel=1e-12)
