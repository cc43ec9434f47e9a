"""Multi-head latent attention (MLA): defaults of its keys, keys that contradict it, and the widths of its products.

Sources: megatron/core/transformer/multi_latent_attention.py and transformer_config.py, MLATransformerConfig.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from trainer.contract.config import ModelConfig, RopeScaling
from trainer.contract.config.unused_keys import Mistake, unused_keys

LATENT_WIDTHS = {"kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
"""Megatron-Core's defaults of the widths of latents and heads."""

KEYS = ("q_lora_rank", *LATENT_WIDTHS)
"""Keys of the section `model` that need multi_latent_attention."""


def resolve_latent_attention(model: ModelConfig) -> ModelConfig:
    """`model` with the widths of its latents and heads. Only the output projection of MLA has a bias."""
    widths: dict[str, Any] = {key: getattr(model, key) or width for key, width in LATENT_WIDTHS.items()}
    return dataclasses.replace(
        model,
        **widths,
        kv_channels=model.kv_channels or widths["qk_head_dim"] + widths["qk_pos_emb_head_dim"],
        add_qkv_bias=bool(model.add_qkv_bias),
    )


def projections(model: ModelConfig) -> list[tuple[int, int]]:
    """Widths of input and output of each projection of an attention layer of the resolved `model`."""
    heads, h, width = model.num_attention_heads, model.hidden_size, model.kv_channels or 0
    if not model.multi_latent_attention:
        return [(h, (heads + 2 * (model.num_query_groups or 0)) * width), (heads * width, h)]
    latent, values = model.kv_lora_rank or 0, value_width(model)
    rank, queries = model.q_lora_rank, heads * width
    return [
        *([(h, queries)] if rank is None else [(h, rank), (rank, queries)]),
        (h, latent + (model.qk_pos_emb_head_dim or 0)),
        (latent, heads * ((model.qk_head_dim or 0) + values)),
        (heads * values, h),
    ]


def down_projections(model: ModelConfig) -> list[tuple[int, int]]:
    """Those projections that each tensor-parallel rank has complete: from the hidden state to the latents of MLA."""
    if not model.multi_latent_attention:
        return []
    widths = (model.q_lora_rank, (model.kv_lora_rank or 0) + (model.qk_pos_emb_head_dim or 0))
    return [(model.hidden_size, width) for width in widths if width is not None]


def value_width(model: ModelConfig) -> int:
    """Width of the values in a head of the resolved `model`."""
    width = model.v_head_dim if model.multi_latent_attention else model.kv_channels
    assert width
    return width


def latent_width(model: ModelConfig) -> int:
    """Total width of the latents of the resolved `model`, which qk_layernorm normalizes. 0 without MLA."""
    return (model.q_lora_rank or 0) + (model.kv_lora_rank or 0) if model.multi_latent_attention else 0


def latent_attention_problems(model: ModelConfig) -> Iterator[Mistake]:
    """Keys that contradict multi_latent_attention, or that need it."""
    if not model.multi_latent_attention:
        needed = "set multi_latent_attention to true"
        yield from unused_keys(model, KEYS, "multi_latent_attention is false", needed)
        return
    if model.position_embedding_type != "rope":
        reason = f"requires position_embedding_type = rope, but it is {model.position_embedding_type}"
        yield "multi_latent_attention", reason, "set position_embedding_type to rope"
    if model.num_query_groups not in (None, model.num_attention_heads):
        reason = "is not used by multi_latent_attention, in which each head has keys and values of its own"
        yield "num_query_groups", reason, "use null"
    width = _query_width(model)
    if model.kv_channels not in (None, width):
        yield "kv_channels", f"is not qk_head_dim + qk_pos_emb_head_dim = {width}", "use null"
    rotated = model.qk_pos_emb_head_dim or 0
    if rotated % 2:
        advice = f"use {rotated + 1}" if rotated == 1 else f"use {rotated - 1} or {rotated + 1}"
        yield "qk_pos_emb_head_dim", "is odd, but rope rotates channels in pairs", advice
    if model.add_qkv_bias:
        reason = "is not supported by multi_latent_attention, which has no such bias"
        yield "add_qkv_bias", reason, "use false"
    if model.rope_scaling is not None and model.rope_scaling.rope_type == "yarn":
        yield from _latent_yarn_problems(model.rope_scaling)


def _query_width(model: ModelConfig) -> int:
    """Width of queries and keys of latent attention in each head."""
    return sum(getattr(model, key) or LATENT_WIDTHS[key] for key in ("qk_head_dim", "qk_pos_emb_head_dim"))


def _latent_yarn_problems(scaling: RopeScaling) -> Iterator[tuple[str, str, str]]:
    """Values of YaRN that Core's latent attention computes differently from transformers, or not at all."""
    if scaling.attention_factor is not None:
        reason = (
            "is not supported with multi_latent_attention, which computes it from mscale and mscale_all_dim"
        )
        yield "rope_scaling.attention_factor", reason, "use null"
    if scaling.truncate is False:
        yield "rope_scaling.truncate", "is always true with multi_latent_attention", "use true"
    given = (scaling.mscale, scaling.mscale_all_dim)
    if given != (None, None) and not all(given):
        reason = "requires mscale and mscale_all_dim together, both above 0, with multi_latent_attention"
        yield "rope_scaling", reason, "set both, as in the model's config.json, or neither"
