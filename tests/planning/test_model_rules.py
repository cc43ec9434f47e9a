"""Rules for the shape of the model from both sides: what passes, and what a user reads when it does not."""

from __future__ import annotations

import dataclasses

import pytest

from tests.planning.cases import GROUPS, HEADS, MLA, MTP, ROPE, TP, YARN, broken, errors
from trainer.contract.config import RopeScaling
from trainer.contract.rules import model, multi_token

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
        "model.num_attention_heads",
        model.heads_divide_hidden_size,
    ),
    "query groups do not divide heads": (
        {GROUPS: 3},
        "model.num_query_groups",
        model.query_groups_divide_heads,
    ),
    "odd kv_channels with rope": (
        {**ROPE, "model__kv_channels": 63},
        "model.kv_channels",
        model.rotary_head_width_is_even,
    ),
    "odd derived head width with rope": (
        {**ROPE, "model__hidden_size": 1008},
        "model.num_attention_heads",
        model.rotary_head_width_is_even,
    ),
    "positions shorter than the sequence": (
        {"model__max_position_embeddings": 1024},
        "model.max_position_embeddings",
        model.positions_cover_sequence,
    ),
    "an activation beside swiglu": (
        {"model__swiglu": True, "model__activation_func": "gelu"},
        "model.activation_func",
        model.activation_is_used,
    ),
    "biases without that of QKV": (
        {"model__add_qkv_bias": False},
        "model.add_qkv_bias",
        model.keys_fit_attention,
    ),
    "scaled rope without rope": (
        {"model__rope_scaling": RopeScaling(rope_type="linear", factor=2.0)},
        "model.rope_scaling",
        model.scaling_needs_rope,
    ),
    "llama3 without a key": (
        {**ROPE, "model__rope_scaling": dataclasses.replace(LLAMA3, low_freq_factor=None)},
        "model.rope_scaling",
        model.scaling_has_its_keys,
    ),
    "yarn without the length of the first training": (
        {**ROPE, "model__rope_scaling": RopeScaling(rope_type="yarn", factor=4.0)},
        "model.rope_scaling",
        model.scaling_has_its_keys,
    ),
    "linear with a key of another type": (
        {**ROPE, "model__rope_scaling": RopeScaling(rope_type="linear", factor=2.0, beta_fast=32.0)},
        "model.rope_scaling.beta_fast",
        model.scaling_has_its_keys,
    ),
    "bounds of llama3 in the wrong order": (
        {**ROPE, "model__rope_scaling": dataclasses.replace(LLAMA3, low_freq_factor=4.0)},
        "model.rope_scaling.high_freq_factor",
        model.scaling_has_its_keys,
    ),
    "bounds of yarn in the wrong order": (
        {**ROPE, "model__rope_scaling": dataclasses.replace(YARN, beta_slow=33.0)},
        "model.rope_scaling.beta_fast",
        model.scaling_has_its_keys,
    ),
    "padding cuts tokens off": (
        {"model__padded_vocab_size": 50000},
        "model.padded_vocab_size",
        model.padded_vocabulary_covers_vocabulary,
    ),
    "MTP with learned positions": (
        {"model__mtp_num_layers": 1},
        "model.mtp_num_layers",
        multi_token.mtp_needs_rope,
    ),
    "MTP with another model": (
        MTP | {"model__model_provider": "my.models:Model"},
        "model.mtp_num_layers",
        multi_token.mtp_needs_model_of_core,
    ),
    "MLA with learned positions": (
        {"model__multi_latent_attention": True},
        "model.multi_latent_attention",
        model.keys_fit_attention,
    ),
    "a latent without MLA": (
        {"model__kv_lora_rank": 512},
        "model.kv_lora_rank",
        model.keys_fit_attention,
    ),
    "MLA with query groups": (
        MLA | {GROUPS: 4},
        "model.num_query_groups",
        model.keys_fit_attention,
    ),
    "MLA with another width of heads": (
        MLA | {"model__kv_channels": 128},
        "model.kv_channels",
        model.keys_fit_attention,
    ),
    "latents without MLA": (
        {"model__q_lora_rank": 64, "model__v_head_dim": 32},
        "model.q_lora_rank",
        model.keys_fit_attention,
    ),
    "MLA with an odd rotated width": (
        MLA | {"model__qk_pos_emb_head_dim": 33},
        "model.qk_pos_emb_head_dim",
        model.keys_fit_attention,
    ),
    "MLA with a bias of queries": (
        MLA | {"model__add_qkv_bias": True},
        "model.add_qkv_bias",
        model.keys_fit_attention,
    ),
    "MLA with a factor of YaRN": (
        MLA | {"model__rope_scaling": dataclasses.replace(YARN, attention_factor=1.2)},
        "model.rope_scaling.attention_factor",
        model.keys_fit_attention,
    ),
    "MLA with half of YaRN's scales": (
        MLA | {"model__rope_scaling": dataclasses.replace(YARN, mscale=1.0)},
        "model.rope_scaling",
        model.keys_fit_attention,
    ),
    "MLA with YaRN's exact bounds": (
        MLA | {"model__rope_scaling": dataclasses.replace(YARN, truncate=False)},
        "model.rope_scaling.truncate",
        model.keys_fit_attention,
    ),
    "layers that are no import path": (
        {"model__layer_spec": "my layers:spec"},
        "model.layer_spec",
        model.architecture_is_an_import_path,
    ),
}


@pytest.mark.parametrize(("changes", "path", "rule"), REFUSED.values(), ids=REFUSED)
def test_a_broken_rule_is_one_problem(changes, path, rule):
    assert broken(**changes) == [(path, rule)]


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
