"""DeepSeek-V3: multi-head latent attention and layers for multi-token prediction (MTP)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.contract.config import ModelConfig
from trainer.contract.families.config_json import contradiction
from trainer.contract.families.expert_families import ExpertNames, experts
from trainer.contract.families.llama_families import ROTARY_KEYS, gated_mlp
from trainer.contract.families.model_family import Family, LayerPrefix, Weight, head, layer_places, odd
from trainer.contract.model import rope_parameters
from trainer.contract.model.experts import num_moe_layers
from trainer.contract.problem import Problem

KEYS = ROTARY_KEYS | {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Keys of ModelConfig -> of config.json, in every model."""

EXPERT_KEYS = {
    "num_moe_experts": "n_routed_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
}
"""Keys of ModelConfig -> of config.json, in models with experts."""

NAMES = ExpertNames("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")

NORM_EPSILON = 1e-6
"""Epsilon of the norms of latents in transformers, which ignores rms_norm_eps there (DeepseekV3Attention)."""


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3(Family):
    """DeepSeek-V3: dense layers, followed by layers with experts that are chosen by sigmoid and a bias."""

    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    expert_keys: Mapping[str, str] = field(default_factory=lambda: EXPERT_KEYS)
    # with latent attention, the last three follow from other keys
    written = (*Family.written, *rope_parameters.KEYS, "kv_channels", "num_query_groups", "add_qkv_bias")

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
            **(_experts(model) if model.num_moe_experts is not None else {}),
        }

    def weights(self, model: ModelConfig) -> Iterator[Weight]:
        """Yields matrices and norms. MTP layers follow the others, as in DeepSeek's own checkpoints."""
        h = model.hidden_size
        table = (model.padded_vocab_size or 0, h)
        yield Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), table, "vocabulary")
        for place, has_experts in layer_places(model):
            yield from _layer(model, place, has_experts)
        yield Weight("decoder.final_layernorm.weight", ("model.norm.weight",), (h,))
        for number in range(model.mtp_num_layers or 0):
            core, name = f"mtp.layers.{number}.", f"model.layers.{model.num_layers + number}."
            yield Weight(f"{core}enorm.weight", (f"{name}enorm.weight",), (h,))
            yield Weight(f"{core}hnorm.weight", (f"{name}hnorm.weight",), (h,))
            yield Weight(f"{core}eh_proj.weight", (f"{name}eh_proj.weight",), (h, 2 * h))
            yield from _layer(model, LayerPrefix(f"{core}transformer_layer.", name), has_experts)
            yield Weight(f"{core}final_layernorm.weight", (f"{name}shared_head.norm.weight",), (h,))
        yield from head(model)

    def to_config(self, model: ModelConfig) -> dict[str, Any]:
        """The keys of the shape, including the number of dense layers before the first layer with experts."""
        return {
            **super().to_config(model),
            "num_key_value_heads": model.num_attention_heads,
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_interleave": True,
            "first_k_dense_replace": model.num_layers - num_moe_layers(model),
            **(_expert_config(model) if model.num_moe_experts is not None else {}),
            "num_nextn_predict_layers": model.mtp_num_layers or 0,
            **rope_parameters.to_config(model),
        }

    def from_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The model section. Training sequences have the length before the rotary embedding was scaled."""
        return {
            **super().from_config(config),
            **rope_parameters.from_config(config),
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "normalization": "RMSNorm",
            "swiglu": True,
            "add_bias_linear": False,
            "mtp_num_layers": config["num_mtp_layers"] or None,
            **_expert_section(config),
        }

    def contradictions(self, config: Mapping[str, Any]) -> Iterator[Problem]:
        """Yields grouped queries and a different width of the rotated part, because latent attention has neither."""
        for key, same in (("num_key_value_heads", "num_attention_heads"), ("head_dim", "qk_rope_head_dim")):
            if config[key] not in (None, config[same]):
                reason = f"differs from {same} = {config[same]}, which is not supported"
                yield contradiction({key: config[key]}, reason)
        yield from odd(config, "qk_rope_head_dim")
        yield from rope_parameters.contradictions(config)

    def stored(self, model: ModelConfig, names: Collection[str]) -> ModelConfig:
        """`model` without MTP layers if the files have none. transformers does not save them."""
        first = f"model.layers.{model.num_layers}."
        has_mtp = any(name.startswith(first) for name in names)
        return model if has_mtp else dataclasses.replace(model, mtp_num_layers=None)

    def copies(self, model: ModelConfig) -> dict[str, str]:
        """Also the copies of embedding and head that DeepSeek stores with each MTP layer."""
        layers = [f"model.layers.{model.num_layers + n}." for n in range(model.mtp_num_layers or 0)]
        embeddings = {f"{layer}embed_tokens.weight": "model.embed_tokens.weight" for layer in layers}
        heads = {f"{layer}shared_head.head.weight": self.output(model) for layer in layers}
        return super().copies(model) | embeddings | heads


def _layer(model: ModelConfig, place: LayerPrefix, has_experts: bool) -> Iterator[Weight]:
    """Yields the tensors of a layer."""
    h = model.hidden_size
    yield Weight(f"{place.core}input_layernorm.weight", (f"{place.name}input_layernorm.weight",), (h,))
    yield from _attention(model, f"{place.core}self_attention.", f"{place.name}self_attn.")
    if not has_experts:
        norm = f"{place.name}post_attention_layernorm.weight"
        yield Weight(f"{place.core}mlp.linear_fc1.layer_norm_weight", (norm,), (h,))
        yield from gated_mlp(f"{place.core}mlp", f"{place.name}mlp", (h, model.ffn_hidden_size or 0))
        return
    yield from experts(model, place, NAMES)
    bias = (f"{place.name}mlp.gate.e_score_correction_bias",)
    yield Weight(f"{place.core}mlp.router.expert_bias", bias, (model.num_moe_experts or 0,), "fp32")
    shared = model.moe_shared_expert_intermediate_size or 0
    yield from gated_mlp(f"{place.core}mlp.shared_experts", f"{place.name}mlp.shared_experts", (h, shared))


def _experts(model: ModelConfig) -> dict[str, tuple[Any, ...]]:
    """The values of keys of experts that transformers can express."""
    width, shared = model.moe_ffn_hidden_size or 1, model.moe_shared_expert_intermediate_size
    dense = model.num_layers - num_moe_layers(model)
    layers = (0,) * dense + (1,) * (model.num_layers - dense)
    return {
        "num_moe_experts": (model.num_moe_experts,),
        "moe_layer_freq": (layers,) if dense else (None, layers),
        "moe_shared_expert_intermediate_size": (shared if shared and shared % width == 0 else width,),
        "moe_router_score_function": ("sigmoid",),
        # transformers divides the weights of the chosen experts by their sum, Megatron-Core only if there are several.
        "moe_router_topk": (max(2, model.moe_router_topk),),
        "moe_router_enable_expert_bias": (True,),
        # transformers rates a group by its two best experts, Megatron-Core by its best moe_router_topk //
        # moe_router_group_topk.
        "moe_router_group_topk": tuple(
            n for n in range(1, model.moe_router_topk + 1) if model.moe_router_topk // n == 2
        )
        if model.moe_router_num_groups is not None
        else (None,),
        "moe_expert_capacity_factor": (None,),
    }


def _expert_config(model: ModelConfig) -> dict[str, Any]:
    width, shared = model.moe_ffn_hidden_size or 1, model.moe_shared_expert_intermediate_size or 0
    return {
        **{name: getattr(model, key) or 1 for key, name in EXPERT_KEYS.items()},
        "n_shared_experts": shared // width,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _expert_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of experts, or none if all layers are dense."""
    num_layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    if dense >= num_layers:
        return {}
    no_groups = (
        dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk")) if config["n_group"] == 1 else {}
    )
    return {
        **{key: config[name] for key, name in EXPERT_KEYS.items()},
        **no_groups,
        "moe_layer_freq": [0] * dense + [1] * (num_layers - dense) if dense else None,
        "moe_shared_expert_intermediate_size": config["n_shared_experts"] * config["moe_intermediate_size"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "none",
    }


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
