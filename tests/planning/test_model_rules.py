"""Rules for the shape of the model from both sides: what passes, and what a user reads when it does not."""

from __future__ import annotations

import dataclasses

import pytest

from tests.planning.cases import GROUPS, HEADS, MLA, MTP, ROPE, TP, YARN, errors
from trainer.contract.config import RopeScaling

LLAMA3 = RopeScaling(
    rope_type="llama3",
    factor=8.0,
    original_max_position_embeddings=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)

REFUSED = {
    "heads do not divide hidden size": (
        {HEADS: 24},
        "model.num_attention_heads does not divide model.hidden_size = 1024 (1024 / 24), and "
        "model.kv_channels is null; use 4, 8, 16 or 32",
    ),
    "query groups do not divide heads": (
        {GROUPS: 3},
        "model.num_query_groups does not divide model.num_attention_heads = 16 (16 / 3); "
        "use 1, 2, 4, 8 or 16",
    ),
    "odd kv_channels with rope": (
        {**ROPE, "model__kv_channels": 63},
        "model.kv_channels is odd, but position_embedding_type = rope rotates channels in pairs; use 62 or "
        "64",
    ),
    "odd derived head width with rope": (
        {**ROPE, "model__hidden_size": 1008},
        "model.num_attention_heads results in heads of 63 channels (1008 / 16), but "
        "position_embedding_type = rope rotates channels in pairs; use 12, 14, 18 or 21",
    ),
    "positions shorter than the sequence": (
        {"model__max_position_embeddings": 1024},
        "model.max_position_embeddings is less than model.seq_length = 2048; use 2048, or reduce seq_length",
    ),
    "an activation beside swiglu": (
        {"model__swiglu": True, "model__activation_func": "gelu"},
        "model.activation_func has no effect, because swiglu = true uses SiLU; set swiglu to false or remove it",
    ),
    "biases without that of QKV": (
        {"model__add_qkv_bias": False},
        "model.add_qkv_bias contradicts add_bias_linear = true, which includes this bias; set add_bias_linear to "
        "false or remove add_qkv_bias",
    ),
    "scaled rope without rope": (
        {"model__rope_scaling": RopeScaling(rope_type="linear", factor=2.0)},
        "model.rope_scaling requires position_embedding_type = rope, but it is learned_absolute; set "
        "position_embedding_type to rope or remove rope_scaling",
    ),
    "llama3 without a key": (
        {**ROPE, "model__rope_scaling": dataclasses.replace(LLAMA3, low_freq_factor=None)},
        "model.rope_scaling has no low_freq_factor, which rope_type = llama3 requires; take the value from the model's "
        "config.json",
    ),
    "yarn without the length of the first training": (
        {**ROPE, "model__rope_scaling": RopeScaling(rope_type="yarn", factor=4.0)},
        "model.rope_scaling has no original_max_position_embeddings, which rope_type = yarn requires; set it to the "
        "seq_length of the first training, or take the value from the model's config.json",
    ),
    "linear with a key of another type": (
        {**ROPE, "model__rope_scaling": RopeScaling(rope_type="linear", factor=2.0, beta_fast=32.0)},
        "model.rope_scaling.beta_fast is not used by rope_type = linear; remove it",
    ),
    "bounds of llama3 in the wrong order": (
        {**ROPE, "model__rope_scaling": dataclasses.replace(LLAMA3, low_freq_factor=4.0)},
        "model.rope_scaling.high_freq_factor must be greater than low_freq_factor = 4; use more than 4",
    ),
    "bounds of yarn in the wrong order": (
        {**ROPE, "model__rope_scaling": dataclasses.replace(YARN, beta_slow=33.0)},
        "model.rope_scaling.beta_fast must be at least beta_slow = 33; use 33 or more",
    ),
    "padding cuts tokens off": (
        {"model__padded_vocab_size": 50000},
        "model.padded_vocab_size is less than model.vocab_size = 50257; use 50304, or set it to null, "
        "which pads vocab_size to a multiple of 128",
    ),
    "MTP with learned positions": (
        {"model__mtp_num_layers": 1},
        "model.mtp_num_layers requires position_embedding_type = rope, but it is learned_absolute; set "
        "position_embedding_type to rope or remove mtp_num_layers",
    ),
    "MTP with another model": (
        MTP | {"model__model_provider": "my.models:Model"},
        "model.mtp_num_layers requires Megatron-Core's GPTModel, but model.model_provider is set; remove one of them",
    ),
    "MLA with learned positions": (
        {"model__multi_latent_attention": True},
        "model.multi_latent_attention requires position_embedding_type = rope, but it is learned_absolute; set "
        "position_embedding_type to rope",
    ),
    "a latent without MLA": (
        {"model__kv_lora_rank": 512},
        "model.kv_lora_rank has no effect, because multi_latent_attention is false; set multi_latent_attention to "
        "true, or use null",
    ),
    "MLA with query groups": (
        MLA | {GROUPS: 4},
        "model.num_query_groups is not used by multi_latent_attention, in which each head has keys and values of its "
        "own; use null",
    ),
    "MLA with another width of heads": (
        MLA | {"model__kv_channels": 128},
        "model.kv_channels is not qk_head_dim + qk_pos_emb_head_dim = 192; use null",
    ),
    "latents without MLA": (
        {"model__q_lora_rank": 64, "model__v_head_dim": 32},
        "model.q_lora_rank has no effect, because multi_latent_attention is false. The same applies to v_head_dim; set "
        "multi_latent_attention to true, or use q_lora_rank: null, v_head_dim: null",
    ),
    "MLA with an odd rotated width": (
        MLA | {"model__qk_pos_emb_head_dim": 33},
        "model.qk_pos_emb_head_dim is odd, but rope rotates channels in pairs; use 32 or 34",
    ),
    "MLA with a bias of queries": (
        MLA | {"model__add_qkv_bias": True},
        "model.add_qkv_bias is not supported by multi_latent_attention, which has no such bias; use false",
    ),
    "MLA with a factor of YaRN": (
        MLA | {"model__rope_scaling": dataclasses.replace(YARN, attention_factor=1.2)},
        "model.rope_scaling.attention_factor is not supported with multi_latent_attention, which computes it from "
        "mscale and mscale_all_dim; use null",
    ),
    "MLA with half of YaRN's scales": (
        MLA | {"model__rope_scaling": dataclasses.replace(YARN, mscale=1.0)},
        "model.rope_scaling requires mscale and mscale_all_dim together, both above 0, with multi_latent_attention; "
        "set both, as in the model's config.json, or neither",
    ),
    "MLA with YaRN's exact bounds": (
        MLA | {"model__rope_scaling": dataclasses.replace(YARN, truncate=False)},
        "model.rope_scaling.truncate is always true with multi_latent_attention; use true",
    ),
    "layers that are no import path": (
        {"model__layer_spec": "my layers:spec"},
        "model.layer_spec is not an import path; use package.module:function or file.py:function",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_broken_rule_is_one_message_with_values_that_work(changes, message):
    assert errors(**changes) == [message]


ACCEPTED = {
    "llama3": {**ROPE, "model__rope_scaling": LLAMA3},
    "yarn": {**ROPE, "model__rope_scaling": YARN},
    "linear": {**ROPE, "model__rope_scaling": RopeScaling(rope_type="linear", factor=1.0)},
    "a bias of QKV only": {"model__add_bias_linear": False, "model__add_qkv_bias": True},
    "a window longer than the sequence": {"model__window_size": 4096, "model__activation_func": "gelu"},
    "nothing special": {},
    "kv_channels frees the heads": {HEADS: 24, "model__kv_channels": 64},
    "one query group": {GROUPS: 1, TP: 16},
    "an odd head width without rope": {"model__hidden_size": 1008},
    "rope": ROPE,
    "positions beyond the sequence": {"model__max_position_embeddings": 4096},
    "no vocabulary size yet": {"model__vocab_size": None},
    "layers of a package": {"model__layer_spec": "my.layers:spec"},
    "MLA with DeepSeek's YaRN": MLA
    | {"model__rope_scaling": dataclasses.replace(YARN, mscale=1.0, mscale_all_dim=1.0)},
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_valid_values_pass(changes):
    assert errors(**changes) == []
