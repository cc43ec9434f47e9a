"""DeepSeek-V3: multi-head latent attention and layers for multi-token prediction (MTP)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.contract import rope_parameters
from trainer.contract.config import ModelConfig
from trainer.contract.llama_families import gated_mlp
from trainer.contract.model_family import STACKED, Family, Place, Weight, head

WIDTHS = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Keys of ModelConfig -> of config.json."""

NORM_EPSILON = 1e-6
"""Epsilon of the norms of latents in transformers, which ignores rms_norm_eps there (DeepseekV3Attention)."""


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3(Family):
    """DeepSeek-V3 with dense layers."""

    def expresses(self, model: ModelConfig) -> dict[str, tuple[Any, ...]]:
        """Latent attention with norms, RMSNorm and SwiGLU, without biases."""
        return {
            "multi_latent_attention": (True,),
            "qk_layernorm": (True,),
            "layernorm_epsilon": (NORM_EPSILON,),
            "mtp_num_layers": (model.mtp_num_layers,),
            "position_embedding_type": ("rope",),
            "normalization": ("RMSNorm",),
            "swiglu": (True,),
            "add_bias_linear": (False,),
            "window_size": (None,),
        }

    def weights(self, model: ModelConfig) -> Iterator[Weight]:
        """Yields matrices and norms. MTP layers follow the others, as in DeepSeek's own checkpoints."""
        h = model.hidden_size
        table = (model.padded_vocab_size or 0, h)
        yield Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), table, "vocabulary")
        yield from self.layer(model, STACKED)
        yield Weight("decoder.final_layernorm.weight", ("model.norm.weight",), (h,))
        for number in range(model.mtp_num_layers or 0):
            core, name = f"mtp.layers.{number}.", f"model.layers.{model.num_layers + number}."
            yield Weight(f"{core}enorm.weight", (f"{name}enorm.weight",), (h,))
            yield Weight(f"{core}hnorm.weight", (f"{name}hnorm.weight",), (h,))
            yield Weight(f"{core}eh_proj.weight", (f"{name}eh_proj.weight",), (h, 2 * h))
            yield from self.layer(model, Place(f"{core}transformer_layer.", name))
            yield Weight(f"{core}final_layernorm.weight", (f"{name}shared_head.norm.weight",), (h,))
        yield from head(model)

    def layer(self, model: ModelConfig, place: Place) -> Iterator[Weight]:
        """Yields the tensors of a layer."""
        h = model.hidden_size
        yield Weight(f"{place.core}input_layernorm.weight", (f"{place.name}input_layernorm.weight",), (h,))
        yield from _attention(model, f"{place.core}self_attention.", f"{place.name}self_attn.")
        norm = f"{place.name}post_attention_layernorm.weight"
        yield Weight(f"{place.core}mlp.linear_fc1.layer_norm_weight", (norm,), (h,))
        yield from gated_mlp(f"{place.core}mlp", f"{place.name}mlp", (h, model.ffn_hidden_size or 0))

    def to_config(self, model: ModelConfig) -> dict[str, Any]:
        """The shape, and the first layer with experts, which is none of them."""
        return {
            "max_position_embeddings": model.max_position_embeddings,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_hidden_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_attention_heads,
            **{name: getattr(model, key) for key, name in WIDTHS.items()},
            "hidden_act": "silu",
            "rms_norm_eps": model.layernorm_epsilon,
            "attention_dropout": model.attention_dropout,
            "attention_bias": False,
            "rope_interleave": True,
            "first_k_dense_replace": model.num_layers,
            "num_nextn_predict_layers": model.mtp_num_layers or 0,
            **rope_parameters.to_config(model),
        }

    def from_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The model section. Training sequences have the length before the rotary embedding was scaled."""
        rope = rope_parameters.from_config(config)
        length = config["max_position_embeddings"]
        return {
            "num_layers": config["num_hidden_layers"],
            "hidden_size": config["hidden_size"],
            "num_attention_heads": config["num_attention_heads"],
            "ffn_hidden_size": config["intermediate_size"],
            "max_position_embeddings": length,
            "seq_length": (rope["rope_scaling"] or {}).get("original_max_position_embeddings", length),
            "position_embedding_type": "rope",
            **rope,
            "multi_latent_attention": True,
            **{key: config[name] for key, name in WIDTHS.items()},
            "qk_layernorm": True,
            "normalization": "RMSNorm",
            "layernorm_epsilon": config["rms_norm_eps"],
            "swiglu": True,
            "add_bias_linear": False,
            "attention_dropout": config["attention_dropout"],
            "mtp_num_layers": config.get("num_nextn_predict_layers") or None,
        }

    def stored(self, model: ModelConfig, names: Collection[str]) -> ModelConfig:
        """`model` without MTP layers if the files have none, as those that transformers saves."""
        first = f"model.layers.{model.num_layers}."
        has_mtp = any(name.startswith(first) for name in names)
        return model if has_mtp else dataclasses.replace(model, mtp_num_layers=None)

    def copies(self, model: ModelConfig) -> dict[str, str]:
        """The copies of embedding and head that DeepSeek stores with each MTP layer."""
        layers = [f"model.layers.{model.num_layers + n}." for n in range(model.mtp_num_layers or 0)]
        embeddings = {f"{layer}embed_tokens.weight": "model.embed_tokens.weight" for layer in layers}
        return embeddings | {f"{layer}shared_head.head.weight": "lm_head.weight" for layer in layers}


def _attention(model: ModelConfig, core: str, name: str) -> Iterator[Weight]:
    """Yields the projections of latent attention. Those to the heads come after a norm of the latent."""
    heads, h, rank, latent = (
        model.num_attention_heads,
        model.hidden_size,
        model.q_lora_rank,
        model.kv_lora_rank or 0,
    )
    width, rotated, values = model.kv_channels or 0, model.qk_pos_emb_head_dim or 0, model.v_head_dim or 0
    if rank is None:
        yield Weight(f"{core}linear_q_proj.weight", (f"{name}q_proj.weight",), (heads * width, h))
    else:
        yield Weight(f"{core}linear_q_down_proj.weight", (f"{name}q_a_proj.weight",), (rank, h))
        norm = f"{core}linear_q_up_proj.layer_norm_weight"
        yield Weight(norm, (f"{name}q_a_layernorm.weight",), (rank,))
        yield Weight(f"{core}linear_q_up_proj.weight", (f"{name}q_b_proj.weight",), (heads * width, rank))
    down = (f"{name}kv_a_proj_with_mqa.weight",)
    yield Weight(f"{core}linear_kv_down_proj.weight", down, (latent + rotated, h))
    norm = f"{core}linear_kv_up_proj.layer_norm_weight"
    yield Weight(norm, (f"{name}kv_a_layernorm.weight",), (latent,))
    rows = heads * (width - rotated + values)
    yield Weight(f"{core}linear_kv_up_proj.weight", (f"{name}kv_b_proj.weight",), (rows, latent))
    yield Weight(f"{core}linear_proj.weight", (f"{name}o_proj.weight",), (h, heads * values))
