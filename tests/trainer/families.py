"""Small models of Hugging Face transformers, and their weights and configuration in the trainer's terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers

VOCAB, LENGTH = 128, 48
SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": LENGTH}
LLAMA = SHAPE | {
    "num_query_groups": 2,
    "ffn_hidden_size": 96,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": VOCAB,
}
GPT2 = SHAPE | {"padded_vocab_size": VOCAB}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
LATENT = {
    "num_query_groups": None,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 10,
}
LATENT_NAMES = {
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
}
"""Modules of latent attention in transformers -> in Megatron-Core."""
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}


@dataclass(frozen=True)
class Family:
    """A model of transformers and the section `model` that describes it."""

    reference: str
    """Prefix of its class: Llama for LlamaConfig."""
    options: dict[str, Any]
    model: dict[str, Any]

    def build(self) -> torch.nn.Module:
        """The model with random weights in every parameter, so that each of them matters."""
        config = getattr(transformers, f"{self.reference}Config")(**self.options)
        torch.manual_seed(1)
        built: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                offset = 1.0 if "norm" in name or (".ln_" in name and name.endswith("weight")) else 0.0
                parameter.copy_(offset + 0.2 * torch.randn_like(parameter))
        return built


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2",
        {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4},
        GPT2 | {"activation_func": "gelu_tanh"},
    ),
    "gpt2 with exact gelu": Family(
        "GPT2",
        {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
        | {"activation_function": "gelu"},
        GPT2 | {"activation_func": "gelu"},
    ),
    "llama": Family("Llama", SIZES, LLAMA),
    **{
        f"llama with {name}": Family(
            "Llama",
            SIZES | {"rope_parameters": {"rope_theta": 10000.0, **scaling}},
            LLAMA | {"rope_scaling": scaling},
        )
        for name, scaling in SCALINGS.items()
    },
    "mistral": Family("Mistral", SIZES | {"sliding_window": 7}, LLAMA | {"window_size": 7}),
    "qwen2": Family(
        "Qwen2",
        SIZES | {"tie_word_embeddings": True},
        LLAMA | {"add_qkv_bias": True, "untie_embeddings_and_output_weights": False},
    ),
    "deepseek": Family("DeepseekV3", SIZES | DEEPSEEK, LLAMA | LATENT),
    "qwen3": Family("Qwen3", SIZES | {"head_dim": 32}, LLAMA | {"kv_channels": 32, "qk_layernorm": True}),
}


def megatron_weights(model: torch.nn.Module, num_groups: int = 2) -> dict[str, torch.Tensor]:
    """The weights of `model` by Megatron-Core's names, for the layers without Transformer Engine."""
    weights = dict(model.named_parameters())
    return _gpt2(weights) if "transformer.wte.weight" in weights else _llama(weights, num_groups)


def _llama(hf: dict[str, torch.Tensor], groups: int) -> dict[str, torch.Tensor]:
    core = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if "lm_head.weight" in hf:
        core["output_layer.weight"] = hf["lm_head.weight"]
    for n in range(SHAPE["num_layers"]):
        old, new = f"model.layers.{n}", f"decoder.layers.{n}"
        attention, mlp = f"{old}.self_attn", f"{old}.mlp"
        for kind in ("weight", "bias"):
            if f"{attention}.q_proj.{kind}" in hf:
                parts = (hf[f"{attention}.{x}_proj.{kind}"] for x in "qkv")
                by_group = [part.view(groups, -1, *part.shape[1:]) for part in parts]
                core[f"{new}.self_attention.linear_qkv.{kind}"] = torch.cat(by_group, 1).flatten(0, 1)
        core |= {
            f"{new}.self_attention.{name}.weight": hf[f"{attention}.{theirs}.weight"]
            for theirs, name in LATENT_NAMES.items()
            if f"{attention}.{theirs}.weight" in hf
        }
        core |= {
            f"{new}.input_layernorm.weight": hf[f"{old}.input_layernorm.weight"],
            f"{new}.pre_mlp_layernorm.weight": hf[f"{old}.post_attention_layernorm.weight"],
            f"{new}.self_attention.linear_proj.weight": hf[f"{attention}.o_proj.weight"],
            f"{new}.mlp.linear_fc1.weight": torch.cat(
                [hf[f"{mlp}.gate_proj.weight"], hf[f"{mlp}.up_proj.weight"]]
            ),
            f"{new}.mlp.linear_fc2.weight": hf[f"{mlp}.down_proj.weight"],
        }
        for x in "qk":
            if (norm := f"{attention}.{x}_norm.weight") in hf:
                core[f"{new}.self_attention.{x}_layernorm.weight"] = hf[norm]
    return core


def _gpt2(hf: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    heads = SHAPE["num_attention_heads"]
    core = {
        "embedding.word_embeddings.weight": hf["transformer.wte.weight"],
        "embedding.position_embeddings.weight": hf["transformer.wpe.weight"],
    }
    for kind in ("weight", "bias"):
        core[f"decoder.final_layernorm.{kind}"] = hf[f"transformer.ln_f.{kind}"]
        for n in range(SHAPE["num_layers"]):
            old, new = f"transformer.h.{n}", f"decoder.layers.{n}"
            qkv = hf[f"{old}.attn.c_attn.{kind}"].t()  # GPT-2 stores [in, out]
            by_head = qkv.reshape(3, heads, -1, *qkv.shape[1:]).transpose(0, 1)
            core |= {
                f"{new}.input_layernorm.{kind}": hf[f"{old}.ln_1.{kind}"],
                f"{new}.pre_mlp_layernorm.{kind}": hf[f"{old}.ln_2.{kind}"],
                f"{new}.self_attention.linear_qkv.{kind}": by_head.flatten(0, 2),
                f"{new}.self_attention.linear_proj.{kind}": hf[f"{old}.attn.c_proj.{kind}"].t(),
                f"{new}.mlp.linear_fc1.{kind}": hf[f"{old}.mlp.c_fc.{kind}"].t(),
                f"{new}.mlp.linear_fc2.{kind}": hf[f"{old}.mlp.c_proj.{kind}"].t(),
            }
    return core
