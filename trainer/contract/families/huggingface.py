"""Families of Hugging Face models: each maps its config.json to ModelConfig and its tensors to Megatron-Core's.

A family is one object that export and import both use. It names tensors and how they are stored;
`trainer.huggingface.transforms` converts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.contract.config import ConfigError, ModelConfig, from_dict, typed_value
from trainer.contract.config.resolve import resolve_model
from trainer.contract.families.config_json import TYPES, complete, contradiction
from trainer.contract.families.deepseek_family import DeepSeekV3
from trainer.contract.families.expert_families import ExpertLlama, ExpertNames
from trainer.contract.families.llama_families import LLAMA_KEYS, Llama
from trainer.contract.families.model_family import LAYERS, Family, Form, Weight, head, indivisible
from trainer.contract.model import rope_parameters
from trainer.contract.problem import Problem
from trainer.contract.rules.engine import contradictions
from trainer.contract.wording import shown

ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "squared_relu": "relu2"}
"""Value of model.activation_func -> transformers' name."""

ACTIVATIONS_BY_NAME = {name: key for key, name in ACTIVATIONS.items()} | {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
"""transformers' names, with other names of the same functions -> value of model.activation_func."""


@dataclass(frozen=True, kw_only=True)
class Gpt2(Family):
    """GPT-2 and GPT-3: learned positions, LayerNorm, biases, Conv1D matrices."""

    # rotary_base has no effect without rope
    written = (*Family.written, "activation_func", "rotary_base")

    def expresses(self, model: ModelConfig) -> dict[str, tuple[Any, ...]]:
        """No rotary embedding, no gated MLP, no grouped queries."""
        return {
            "position_embedding_type": ("learned_absolute",),
            "normalization": ("LayerNorm",),
            "swiglu": (False,),
            "add_bias_linear": (True,),
            "add_qkv_bias": (True,),
            "qk_layernorm": (False,),
            "window_size": (None,),
            "num_query_groups": (model.num_attention_heads,),
            "kv_channels": (model.hidden_size // model.num_attention_heads,),
        }

    def weights(self, model: ModelConfig) -> Iterator[Weight]:
        """Yields each matrix with its bias."""
        h, ffn, rows = model.hidden_size, model.ffn_hidden_size or 0, model.padded_vocab_size or 0
        yield Weight("embedding.word_embeddings.weight", ("transformer.wte.weight",), (rows, h), "vocabulary")
        positions = (model.max_position_embeddings or 0, h)
        yield Weight("embedding.position_embeddings.weight", ("transformer.wpe.weight",), positions)
        matrices: tuple[tuple[str, str, str, int, int, Form], ...] = (
            ("self_attention.linear_qkv", "ln_1", "attn.c_attn", 3 * h, h, "qkv_conv1d"),
            ("self_attention.linear_proj", "", "attn.c_proj", h, h, "transposed"),
            ("mlp.linear_fc1", "ln_2", "mlp.c_fc", ffn, h, "transposed"),
            ("mlp.linear_fc2", "", "mlp.c_proj", h, ffn, "transposed"),
        )
        for core, norm, name, rows, columns, form in matrices:
            name = f"transformer.h.{{n}}.{name}"
            if norm:
                for kind in ("weight", "bias"):
                    norm_name = f"transformer.h.{{n}}.{norm}.{kind}"
                    yield Weight(f"{LAYERS}{core}.layer_norm_{kind}", (norm_name,), (h,))
            yield Weight(f"{LAYERS}{core}.weight", (f"{name}.weight",), (rows, columns), form)
            bias_form: Form = "qkv_conv1d" if form == "qkv_conv1d" else "same"
            yield Weight(f"{LAYERS}{core}.bias", (f"{name}.bias",), (rows,), bias_form)
        for kind in ("weight", "bias"):
            yield Weight(f"decoder.final_layernorm.{kind}", (f"transformer.ln_f.{kind}",), (h,))
        yield from head(model)

    def to_config(self, model: ModelConfig) -> dict[str, Any]:
        """Also the activation function, and one dropout for embedding and residual branches."""
        return {
            **super().to_config(model),
            "activation_function": ACTIVATIONS[model.activation_func or "gelu_tanh"],
            "embd_pdrop": model.hidden_dropout,
        }

    def from_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The model section. Here one key sets both dropouts, and the dropout of the residual branches becomes its
        value."""
        return super().from_config(config) | {
            "seq_length": config["n_positions"],
            "activation_func": ACTIVATIONS_BY_NAME[config["activation_function"]],
        }

    def contradictions(self, config: Mapping[str, Any]) -> Iterator[Problem]:
        """Yields an unknown activation function, and heads that do not divide the width."""
        if (activation := config["activation_function"]) not in ACTIVATIONS_BY_NAME:
            reason = f"is not supported; only {', '.join(ACTIVATIONS_BY_NAME)} are"
            yield contradiction({"activation_function": activation}, reason)
        yield from indivisible(config, "n_embd", "n_head")


_ALWAYS_FIXED = {"per_layer_config": (None,)}
_LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    **rope_parameters.DEFAULTS,
}
_MISTRAL_DEFAULTS = _LLAMA_DEFAULTS | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN_DEFAULTS = _LLAMA_DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_EXPERT_KEYS = LLAMA_KEYS | {
    "moe_router_topk": "num_experts_per_tok",
    "moe_aux_loss_coeff": "router_aux_loss_coef",
}
_LLAMA_FIXED = _ALWAYS_FIXED | {"hidden_act": ("silu", "swish")}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Gpt2(
            name="gpt2",
            architecture="GPT2LMHeadModel",
            keys={
                "vocab_size": "vocab_size",
                "max_position_embeddings": "n_positions",
                "hidden_size": "n_embd",
                "num_layers": "n_layer",
                "num_attention_heads": "n_head",
                "ffn_hidden_size": "n_inner",
                "layernorm_epsilon": "layer_norm_epsilon",
                "hidden_dropout": "resid_pdrop",
                "attention_dropout": "attn_pdrop",
                "init_method_std": "initializer_range",
            },
            defaults={
                "vocab_size": 50257,
                "n_positions": 1024,
                "n_embd": 768,
                "n_layer": 12,
                "n_head": 12,
                "n_inner": None,
                "activation_function": "gelu_new",
                "layer_norm_epsilon": 1e-5,
                "resid_pdrop": 0.1,
                "attn_pdrop": 0.1,
                "initializer_range": 0.02,
                "tie_word_embeddings": True,
            },
            fixed=_ALWAYS_FIXED
            | {
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "add_cross_attention": (False,),
            },
            aliases={
                "max_position_embeddings": "n_positions",
                "hidden_size": "n_embd",
                "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head",
            },
        ),
        Llama(
            name="llama",
            architecture="LlamaForCausalLM",
            defaults=_LLAMA_DEFAULTS | {"attention_bias": False, "mlp_bias": False},
            fixed=_LLAMA_FIXED,
            biases=((False, False), (True, True)),
        ),
        Llama(
            name="mistral",
            architecture="MistralForCausalLM",
            defaults=_MISTRAL_DEFAULTS,
            fixed=_LLAMA_FIXED,
            window="always",
        ),
        Llama(
            name="qwen2",
            architecture="Qwen2ForCausalLM",
            defaults=_QWEN_DEFAULTS,
            fixed=_LLAMA_FIXED,
            biases=((False, True),),
            window="by layer",
            head_dim=False,
        ),
        Llama(
            name="qwen3",
            architecture="Qwen3ForCausalLM",
            defaults=_QWEN_DEFAULTS | {"head_dim": 128},
            fixed=_LLAMA_FIXED | {"attention_bias": (False,)},
            qk_layernorm=True,
            window="by layer",
        ),
        ExpertLlama(
            name="mixtral",
            architecture="MixtralForCausalLM",
            defaults=_MISTRAL_DEFAULTS
            | {
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
                "sliding_window": None,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "router_aux_loss_coef": 0.001,
            },
            fixed=_LLAMA_FIXED,
            aliases={"num_experts": "num_local_experts"},
            window="always",
            keys=_EXPERT_KEYS
            | {"num_moe_experts": "num_local_experts", "moe_ffn_hidden_size": "intermediate_size"},
            names=ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
        ),
        ExpertLlama(
            name="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            defaults=_LLAMA_DEFAULTS
            | {
                "vocab_size": 151936,
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_hidden_layers": 24,
                "num_key_value_heads": 4,
                "max_position_embeddings": 32768,
                "num_experts": 128,
                "moe_intermediate_size": 768,
                "num_experts_per_tok": 8,
                "norm_topk_prob": False,
                "decoder_sparse_step": 1,
                "mlp_only_layers": None,
                "router_aux_loss_coef": 0.001,
            },
            fixed=_LLAMA_FIXED | {"attention_bias": (False,), "use_sliding_window": (False,)},
            aliases={"num_local_experts": "num_experts"},
            qk_layernorm=True,
            keys=_EXPERT_KEYS
            | {
                "ffn_hidden_size": "intermediate_size",
                "num_moe_experts": "num_experts",
                "moe_ffn_hidden_size": "moe_intermediate_size",
            },
            names=ExpertNames("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
            has_dense_layers=True,
            normalizes=(True, False),
        ),
        DeepSeekV3(
            name="deepseek_v3",
            architecture="DeepseekV3ForCausalLM",
            defaults=_LLAMA_DEFAULTS
            | {
                "vocab_size": 129280,
                "hidden_size": 7168,
                "intermediate_size": 18432,
                "num_hidden_layers": 61,
                "num_attention_heads": 128,
                "num_key_value_heads": 128,
                "max_position_embeddings": 4096,
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "first_k_dense_replace": 3,
                "n_routed_experts": 256,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 2048,
                "n_shared_experts": 1,
                "routed_scaling_factor": 2.5,
                "n_group": 8,
                "topk_group": 4,
                "num_mtp_layers": 1,
            },
            fixed=_LLAMA_FIXED
            | {
                "attention_bias": (False,),
                "rope_interleave": (True,),
                "norm_topk_prob": (True,),
                "scoring_func": ("sigmoid",),
                "topk_method": ("noaux_tc",),
                "moe_layer_freq": (1,),
            },
            aliases={"num_local_experts": "n_routed_experts", "num_nextn_predict_layers": "num_mtp_layers"},
        ),
    )
}
"""By `model_type`. Of the families that can express a model, export uses the first."""


def nearest_family(model: ModelConfig, name: str | None = None) -> Family:
    """The family `name`, or the first of those that differ least from a resolved `model`."""

    def difference(family: Family) -> tuple[bool, int]:
        misfits = family.misfits(model)
        return any(misfit.is_of_another_kind for misfit in misfits), len(misfits)

    return FAMILIES[name] if name else min(FAMILIES.values(), key=difference)


def family_for(model: ModelConfig, name: str | None = None) -> Family:
    """The family that a resolved `model` is exported as: `name`, or the first that can express it.

    Raises:
        ConfigError: the family, or every family, cannot express it; names the keys of the nearest one.
    """
    nearest = nearest_family(model, name)
    if misfits := nearest.misfits(model):
        listed = "; ".join(misfit.described(f"model.{misfit.key}") for misfit in misfits)
        others = "" if name else ", and no other supported family fits better"
        raise ConfigError(f"{nearest.architecture} cannot express {listed}{others}")
    return nearest


def model_of(config: Any) -> tuple[Family, ModelConfig]:
    """The family and the resolved model of a config.json, with the vocabulary padded as for a new run.

    Raises:
        ConfigError: the architecture is unknown, or a value is missing or not supported.
    """
    if not isinstance(config, Mapping) or not isinstance(config.get("model_type"), str):
        raise ConfigError("it has no model_type, so it does not describe a model of transformers")
    family = _family_of(config)
    if config.get("quantization_config"):
        raise ConfigError("quantization_config is set; only weights that are not quantized are supported")
    values = complete(config, family.defaults, family.fixed, family.aliases)
    if contradicting := list(family.contradictions(values)):
        raise ConfigError("; ".join(map(str, contradicting)))
    given = from_dict(ModelConfig, family.from_config(values), "its model in hpcgen's terms")
    if problems := contradictions(given):
        raise ConfigError("; ".join(_in_terms_of(family, problem) for problem in problems))
    model = resolve_model(given)
    if misfits := family.misfits(model):
        listed = "; ".join(misfit.described(family.name_in_config(misfit.key)) for misfit in misfits)
        raise ConfigError(f"inconsistent shape: {listed}")
    return family, model


def _family_of(config: Mapping[str, Any]) -> Family:
    family = FAMILIES.get(config["model_type"])
    architectures = typed_value(TYPES["architectures"], config.get("architectures"), "architectures") or ()
    if family is None or (architectures and family.architecture not in architectures):
        what = f"model_type = {shown(config['model_type'])}, architectures = {shown(list(architectures))}"
        known = ", ".join(each.architecture for each in FAMILIES.values())
        raise ConfigError(f"{what} is not supported; supported are {known}")
    return family


def _in_terms_of(family: Family, problem: Problem) -> str:
    """The sentence of a problem, with the family's keys of config.json in place of the keys that it names."""
    sentence: str = problem.sentence
    for path in (problem.path, *problem.about):
        key = path.removeprefix("model.")
        sentence = re.sub(rf"(\bmodel\.)?\b{re.escape(key)}\b", family.name_in_config(key), sentence)
    return sentence


def config_of(family: Family, model: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of a resolved `model`. `dtype` is torch's name of the data type of the weights."""
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        **family.to_config(model),
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "dtype": dtype,
        "torch_dtype": dtype,  # transformers before 4.56
        "use_cache": True,
    }
