"""Multi-head latent attention (MLA): defaults of its keys, keys that contradict it, and its products.

Sources: megatron/core/transformer/multi_latent_attention.py and transformer_config.py, MLATransformerConfig.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from trainer.contract.attention.kind import Activation, Attention, MatrixWidth, Projection
from trainer.contract.config import ModelConfig, RopeScaling
from trainer.contract.config.training import RecomputeModule
from trainer.contract.problem import Problem, Setting

LATENT_WIDTHS = {"kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
"""Megatron-Core's defaults of the widths of latents and heads."""


class LatentAttention(Attention):
    """Attention whose keys and values, and optionally queries, are computed from a latent of each token."""

    key = "multi_latent_attention"
    keys = ("q_lora_rank", *LATENT_WIDTHS)
    has_complete_heads = False
    recomputable: ClassVar[Mapping[RecomputeModule, tuple[Activation, ...]]] = {
        "mla_up_proj": ("queries", "keys and values", "normalized latents"),
        "layernorm": ("normalized input",),
    }
    has_cuda_graphs = False

    def resolve(self, model: ModelConfig) -> ModelConfig:
        """`model` with the widths of its latents and heads. Only the output projection has a bias."""
        widths: dict[str, Any] = {key: getattr(model, key) or width for key, width in LATENT_WIDTHS.items()}
        return dataclasses.replace(
            model,
            **widths,
            kv_channels=model.kv_channels or widths["qk_head_dim"] + widths["qk_pos_emb_head_dim"],
            add_qkv_bias=bool(model.add_qkv_bias),
        )

    def problems(self, model: ModelConfig) -> Iterator[Problem]:
        """Keys that Core does not support with latent attention, or computes differently."""
        if model.position_embedding_type != "rope":
            reason = f"requires position_embedding_type = rope, but it is {model.position_embedding_type}"
            yield Problem(
                "model.multi_latent_attention",
                reason,
                settings=(Setting("model.position_embedding_type", "rope"),),
                about=("model.position_embedding_type",),
            )
        if model.num_query_groups not in (None, model.num_attention_heads):
            reason = (
                "is not used by multi_latent_attention, in which each head has keys and values of its own"
            )
            yield Problem(
                "model.num_query_groups", reason, "use null", about=("model.multi_latent_attention",)
            )
        width = _query_width(model)
        if model.kv_channels not in (None, width):
            yield Problem(
                "model.kv_channels",
                f"is not qk_head_dim + qk_pos_emb_head_dim = {width}",
                "use null",
                about=("model.qk_head_dim", "model.qk_pos_emb_head_dim"),
            )
        rotated = model.qk_pos_emb_head_dim or 0
        if rotated % 2:
            advice = f"use {rotated + 1}" if rotated == 1 else f"use {rotated - 1} or {rotated + 1}"
            yield Problem("model.qk_pos_emb_head_dim", "is odd, but rope rotates channels in pairs", advice)
        if model.add_qkv_bias:
            reason = "is not supported by multi_latent_attention, which has no such bias"
            yield Problem("model.add_qkv_bias", reason, "use false", about=("model.multi_latent_attention",))
        if model.yarn is not None:
            yield from _yarn_problems(model.yarn)

    def projections(self, model: ModelConfig) -> tuple[Projection, ...]:
        """Down-projections to the latents, up-projections to the heads, and the output projection.

        The down-projections are replicated on all tensor-parallel ranks.
        """
        h, heads, rank = model.hidden_size, model.num_attention_heads, model.q_lora_rank
        latent, values = model.kv_lora_rank or 0, self.value_width(model)
        queries = heads * (model.kv_channels or 0)
        q_norm, kv_norm = ("q_layernorm", "kv_layernorm") if model.qk_layernorm else (None, None)
        of_queries = (
            (Projection("linear_q_proj", h, queries),)
            if rank is None
            else (
                Projection("linear_q_down_proj", h, rank, divided="none"),
                Projection("linear_q_up_proj", rank, queries, norm=q_norm),
            )
        )
        keys_values = heads * ((model.qk_head_dim or 0) + values)
        return (
            *of_queries,
            Projection("linear_kv_down_proj", h, latent + self.rotated_width(model), divided="none"),
            Projection("linear_kv_up_proj", latent, keys_values, norm=kv_norm),
            Projection("linear_proj", heads * values, h, has_bias=model.add_bias_linear, divided="inputs"),
        )

    def norms(self, model: ModelConfig) -> dict[str, int]:
        """Norms of the latents."""
        return {each.norm: each.inputs for each in self.projections(model) if each.norm}

    def value_width(self, model: ModelConfig) -> int:
        """The value of v_head_dim."""
        assert model.v_head_dim
        return model.v_head_dim

    def rotated_width(self, model: ModelConfig) -> int:
        """Rope rotates only some channels. The keys of all heads share these."""
        assert model.qk_pos_emb_head_dim
        return model.qk_pos_emb_head_dim

    def latent_width(self, model: ModelConfig) -> int:
        """Latents of the queries, and of keys and values."""
        return (model.q_lora_rank or 0) + (model.kv_lora_rank or 0)

    def matrix_widths(self, model: ModelConfig, tensor_parallel: int) -> Iterator[MatrixWidth]:
        """Widths of latents and heads."""
        assert model.kv_lora_rank
        assert model.qk_head_dim
        latent, rotated, values = model.kv_lora_rank, self.rotated_width(model), self.value_width(model)
        heads, over = model.num_attention_heads // tensor_parallel, f"over TP = {tensor_parallel}"
        divided = ("model.num_attention_heads", "parallelism.tensor_model_parallel_size")
        yield MatrixWidth("v_head_dim", values * heads, f" x num_attention_heads {over}", divided)
        if model.q_lora_rank is not None:
            yield MatrixWidth("q_lora_rank", model.q_lora_rank)
        yield MatrixWidth("kv_lora_rank", latent)
        yield MatrixWidth("qk_pos_emb_head_dim", latent + rotated, " + kv_lora_rank", ("model.kv_lora_rank",))
        how = f" + v_head_dim, times num_attention_heads {over},"
        about = ("model.v_head_dim", *divided)
        yield MatrixWidth("qk_head_dim", (model.qk_head_dim + values) * heads, how, about)


def _query_width(model: ModelConfig) -> int:
    """Width of queries and keys in each head, for a model that may have nulls."""
    return sum(getattr(model, key) or LATENT_WIDTHS[key] for key in ("qk_head_dim", "qk_pos_emb_head_dim"))


def _yarn_problems(scaling: RopeScaling) -> Iterator[Problem]:
    """Values of YaRN that Core's latent attention computes differently from transformers, or not at all."""
    if scaling.attention_factor is not None:
        reason = (
            "is not supported with multi_latent_attention, which computes it from mscale and mscale_all_dim"
        )
        yield Problem(
            "model.rope_scaling.attention_factor",
            reason,
            "use null",
            about=("model.rope_scaling.mscale", "model.rope_scaling.mscale_all_dim"),
        )
    if scaling.truncate is False:
        yield Problem("model.rope_scaling.truncate", "is always true with multi_latent_attention", "use true")
    given = (scaling.mscale, scaling.mscale_all_dim)
    if given != (None, None) and not all(given):
        reason = "requires mscale and mscale_all_dim together, both above 0, with multi_latent_attention"
        yield Problem(
            "model.rope_scaling",
            reason,
            "set both, as in the model's config.json, or neither",
            about=("model.multi_latent_attention",),
        )


LATENT = LatentAttention()
