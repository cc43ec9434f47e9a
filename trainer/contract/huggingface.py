"""Families of Hugging Face models: each maps its config.json to ModelConfig and its tensors to Megatron-Core's.

A family is one object that export and import both use. It names tensors and how they are stored;
`trainer.huggingface.transforms` converts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.contract.config import ConfigError, ModelConfig, from_dict
from trainer.contract.deepseek_family import DeepSeekV3
from trainer.contract.expert_families import ExpertLlama, ExpertNames
from trainer.contract.llama_families import Llama
from trainer.contract.model_family import LAYERS, Family, Form, Weight, head
from trainer.contract.resolve import model_problems, resolve_model

ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "squared_relu": "relu2"}
"""Value of model.activation_func -> transformers' name."""

ALIASES = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
"""Other names in transformers of the same functions."""


@dataclass(frozen=True, kw_only=True)
class Gpt2(Family):
    """GPT-2 and GPT-3: learned positions, LayerNorm, biases, Conv1D matrices."""

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
        """GPT-2's names of the shape, and one dropout for embedding and residual branches."""
        return {
            "n_positions": model.max_position_embeddings,
            "n_embd": model.hidden_size,
            "n_layer": model.num_layers,
            "n_head": model.num_attention_heads,
            "n_inner": model.ffn_hidden_size,
            "activation_function": ACTIVATIONS[model.activation_func or "gelu_tanh"],
            "layer_norm_epsilon": model.layernorm_epsilon,
            "resid_pdrop": model.hidden_dropout,
            "embd_pdrop": model.hidden_dropout,
            "attn_pdrop": model.attention_dropout,
        }

    def from_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The model section. Of the two dropouts that are one key here, that of the residual branches counts."""
        activation = config["activation_function"]
        names = {name: key for key, name in ACTIVATIONS.items()} | ALIASES
        if activation not in names:
            raise ConfigError(
                f"activation_function = {activation!r} is not supported; only {', '.join(names)} are"
            )
        return {
            "num_layers": config["n_layer"],
            "hidden_size": config["n_embd"],
            "num_attention_heads": config["n_head"],
            "ffn_hidden_size": config["n_inner"],
            "max_position_embeddings": config["n_positions"],
            "seq_length": config["n_positions"],
            "layernorm_epsilon": config["layer_norm_epsilon"],
            "activation_func": names[activation],
            "hidden_dropout": config["resid_pdrop"],
            "attention_dropout": config["attn_pdrop"],
        }


_LLAMA_DEFAULTS = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
_QWEN_DEFAULTS = _LLAMA_DEFAULTS | {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
}
_SILU = {"hidden_act": ("silu", "swish")}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Gpt2(
            name="gpt2",
            architecture="GPT2LMHeadModel",
            defaults={
                "n_inner": None,
                "activation_function": "gelu_new",
                "layer_norm_epsilon": 1e-5,
                "resid_pdrop": 0.1,
                "attn_pdrop": 0.1,
                "tie_word_embeddings": True,
            },
            fixed={
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "add_cross_attention": (False,),
            },
        ),
        Llama(
            name="llama",
            architecture="LlamaForCausalLM",
            defaults=_LLAMA_DEFAULTS | {"attention_bias": False, "mlp_bias": False},
            fixed=_SILU,
            biases=((False, False), (True, True)),
        ),
        Llama(
            name="mistral",
            architecture="MistralForCausalLM",
            defaults=_LLAMA_DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096},
            fixed=_SILU,
            window="always",
        ),
        Llama(
            name="qwen2",
            architecture="Qwen2ForCausalLM",
            defaults=_QWEN_DEFAULTS,
            fixed=_SILU,
            biases=((False, True),),
            window="by layer",
            head_dim=False,
        ),
        Llama(
            name="qwen3",
            architecture="Qwen3ForCausalLM",
            defaults=_QWEN_DEFAULTS | {"head_dim": 128, "attention_bias": False},
            fixed=_SILU | {"attention_bias": (False,)},
            qk_layernorm=True,
            window="by layer",
        ),
        ExpertLlama(
            name="mixtral",
            architecture="MixtralForCausalLM",
            defaults=_LLAMA_DEFAULTS
            | {
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
                "sliding_window": None,
                "num_experts_per_tok": 2,
                "router_aux_loss_coef": 0.001,
            },
            fixed=_SILU,
            window="always",
            names=ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
            num_experts_keys=("num_local_experts",),
        ),
        ExpertLlama(
            name="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            defaults=_LLAMA_DEFAULTS
            | {
                "num_key_value_heads": 4,
                "attention_bias": False,
                "moe_intermediate_size": 768,
                "num_experts_per_tok": 8,
                "norm_topk_prob": False,
                "decoder_sparse_step": 1,
                "mlp_only_layers": None,
                "router_aux_loss_coef": 0.001,
            },
            fixed=_SILU | {"attention_bias": (False,), "use_sliding_window": (False,)},
            qk_layernorm=True,
            names=ExpertNames("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
            num_experts_keys=("num_experts", "num_local_experts"),
            has_dense_layers=True,
            normalizes=(True, False),
        ),
        DeepSeekV3(
            name="deepseek_v3",
            architecture="DeepseekV3ForCausalLM",
            defaults=_LLAMA_DEFAULTS
            | {
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
            },
            fixed=_SILU
            | {
                "attention_bias": (False,),
                "rope_interleave": (True,),
                "norm_topk_prob": (True,),
                "scoring_func": ("sigmoid",),
                "topk_method": ("noaux_tc",),
                "moe_layer_freq": (1,),
            },
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
        listed = "; ".join(map(str, misfits))
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
    family = FAMILIES.get(config["model_type"])
    architectures = config.get("architectures") or []
    if family is None or (architectures and family.architecture not in architectures):
        what = f"model_type = {config['model_type']!r}, architectures = {architectures!r}"
        known = ", ".join(each.architecture for each in FAMILIES.values())
        raise ConfigError(f"{what} is not supported; supported are {known}")
    if config.get("quantization_config"):
        raise ConfigError("quantization_config is set; only weights that are not quantized are supported")
    for key, allowed in family.fixed.items():
        if config.get(key, allowed[0]) not in allowed:
            raise ConfigError(f"{key} = {config[key]!r} is not supported; only {allowed[0]!r} is")
    complete = {**family.defaults, **config}
    try:
        section = family.from_config(complete)
        section["vocab_size"] = complete["vocab_size"]
    except KeyError as error:
        raise ConfigError(f"{error.args[0]} is missing") from None
    section["untie_embeddings_and_output_weights"] = not complete["tie_word_embeddings"]
    if (std := config.get("initializer_range")) is not None:
        section["init_method_std"] = std
    given = from_dict(ModelConfig, section, "its model in hpcgen's terms")
    for key, reason, _ in model_problems(given):
        raise ConfigError(f"its model in hpcgen's terms: model.{key} {reason}")
    model = resolve_model(given)
    if misfits := family.misfits(model):
        raise ConfigError(f"inconsistent shape: {'; '.join(map(str, misfits))}")
    return family, model


def config_of(family: Family, model: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of a resolved `model`. `dtype` is torch's name of the data type of the weights."""
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": model.vocab_size,
        **family.to_config(model),
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "dtype": dtype,
        "torch_dtype": dtype,  # transformers before 4.56
        "use_cache": True,
    }
