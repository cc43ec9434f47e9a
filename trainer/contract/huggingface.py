"""Families of Hugging Face models: each maps its config.json to ModelConfig and its tensors to Megatron-Core's.

A family is one object that export and import both use. It names tensors and how they are stored;
`trainer.huggingface.transforms` converts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainer.contract import rope_parameters
from trainer.contract.config import ConfigError, ModelConfig, from_dict
from trainer.contract.model_family import LAYERS, Family, Form, Weight
from trainer.contract.resolve import resolve_model

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
        yield from _head(model)

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


@dataclass(frozen=True, kw_only=True)
class Llama(Family):
    """Llama and the families that differ from it in biases, norms and windows."""

    biases: tuple[tuple[bool, bool], ...] = ((False, False),)
    """Possible values of (add_bias_linear, add_qkv_bias)."""
    qk_layernorm: bool = False
    """Queries and keys are normalized."""
    window: Literal["", "always", "by layer"] = ""
    """Sliding windows: none; in every layer if `sliding_window` is set; or as `layer_types` and related keys say."""
    head_dim: bool = True
    """config.json may set the width of a head."""

    def expresses(self, model: ModelConfig) -> dict[str, tuple[Any, ...]]:
        """Rotary embedding, RMSNorm and SwiGLU."""
        linear = tuple(dict.fromkeys(linear for linear, _ in self.biases))
        qkv = tuple(qkv for linear, qkv in self.biases if linear == model.add_bias_linear)
        width = model.hidden_size // model.num_attention_heads
        return {
            "position_embedding_type": ("rope",),
            "normalization": ("RMSNorm",),
            "swiglu": (True,),
            "add_bias_linear": linear,
            "add_qkv_bias": qkv or tuple(qkv for _, qkv in self.biases),
            "qk_layernorm": (self.qk_layernorm,),
            "window_size": (model.window_size,) if self.window else (None,),
            "kv_channels": (model.kv_channels,) if self.head_dim else (width,),
        }

    def weights(self, model: ModelConfig) -> Iterator[Weight]:
        """Yields matrices, and biases where the model has them."""
        h, ffn, d = model.hidden_size, model.ffn_hidden_size or 0, model.kv_channels or 0
        heads, groups = model.num_attention_heads, model.num_query_groups or 0
        embedding = (model.padded_vocab_size or 0, h)
        yield Weight(
            "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), embedding, "vocabulary"
        )
        attention, mlp = f"{LAYERS}self_attention", f"{LAYERS}mlp"
        yield Weight(f"{attention}.linear_qkv.layer_norm_weight", (_layer("input_layernorm.weight"),), (h,))
        rows = (heads + 2 * groups) * d
        qkv = tuple(_layer(f"self_attn.{name}_proj") for name in "qkv")
        yield from _linear(f"{attention}.linear_qkv", qkv, (rows, h), bool(model.add_qkv_bias), "qkv")
        if self.qk_layernorm:
            for name in "qk":
                yield Weight(
                    f"{attention}.{name}_layernorm.weight", (_layer(f"self_attn.{name}_norm.weight"),), (d,)
                )
        output = (_layer("self_attn.o_proj"),)
        yield from _linear(f"{attention}.linear_proj", output, (h, heads * d), model.add_bias_linear)
        norm = _layer("post_attention_layernorm.weight")
        yield Weight(f"{mlp}.linear_fc1.layer_norm_weight", (norm,), (h,))
        gate_up = (_layer("mlp.gate_proj"), _layer("mlp.up_proj"))
        yield from _linear(f"{mlp}.linear_fc1", gate_up, (2 * ffn, h), model.add_bias_linear, "gate_up")
        down = (_layer("mlp.down_proj"),)
        yield from _linear(f"{mlp}.linear_fc2", down, (h, ffn), model.add_bias_linear)
        yield Weight("decoder.final_layernorm.weight", ("model.norm.weight",), (h,))
        yield from _head(model)

    def to_config(self, model: ModelConfig) -> dict[str, Any]:
        """The keys that all these families share, and those of biases and windows."""
        config: dict[str, Any] = {
            "max_position_embeddings": model.max_position_embeddings,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_hidden_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_query_groups,
            "hidden_act": "silu",
            "rms_norm_eps": model.layernorm_epsilon,
            "attention_dropout": model.attention_dropout,
            **rope_parameters.to_config(model),
        }
        if self.head_dim:
            config["head_dim"] = model.kv_channels
        if "attention_bias" in self.defaults:
            config["attention_bias"] = model.add_bias_linear
        if "mlp_bias" in self.defaults:
            config["mlp_bias"] = model.add_bias_linear
        if self.window:
            config["sliding_window"] = model.window_size
        if self.window == "by layer":
            windowed = model.window_size is not None
            kind = "sliding_attention" if windowed else "full_attention"
            config |= {
                "use_sliding_window": windowed,
                "max_window_layers": 0 if windowed else model.num_layers,
                "layer_types": [kind] * model.num_layers,
            }
        return config

    def from_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The model section. Training sequences have the length before the rotary embedding was scaled."""
        rope = rope_parameters.from_config(config)
        length = config["max_position_embeddings"]
        linear_bias = bool(config.get("attention_bias"))
        if "mlp_bias" in self.defaults and bool(config["mlp_bias"]) != linear_bias:
            raise ConfigError(
                f"attention_bias = {config['attention_bias']!r} and mlp_bias = {config['mlp_bias']!r} differ, which is "
                "not supported"
            )
        return {
            "num_layers": config["num_hidden_layers"],
            "hidden_size": config["hidden_size"],
            "num_attention_heads": config["num_attention_heads"],
            "num_query_groups": config["num_key_value_heads"],
            "ffn_hidden_size": config["intermediate_size"],
            "kv_channels": config.get("head_dim"),
            "max_position_embeddings": length,
            "seq_length": (rope["rope_scaling"] or {}).get("original_max_position_embeddings", length),
            "position_embedding_type": "rope",
            **rope,
            "window_size": self._window_size(config),
            "qk_layernorm": self.qk_layernorm,
            "normalization": "RMSNorm",
            "layernorm_epsilon": config["rms_norm_eps"],
            "swiglu": True,
            "add_bias_linear": linear_bias,
            "add_qkv_bias": next(qkv for linear, qkv in self.biases if linear == linear_bias),
            "attention_dropout": config["attention_dropout"],
        }

    def _window_size(self, config: Mapping[str, Any]) -> Any:
        size = config.get("sliding_window")
        if self.window != "by layer":
            return size if self.window else None
        num_layers, first = config["num_hidden_layers"], config["max_window_layers"]
        if size is None or not config["use_sliding_window"]:
            return None
        types = config.get("layer_types") or [
            "sliding_attention" if n >= first else "full_attention" for n in range(num_layers)
        ]
        if len(set(types)) > 1:
            raise ConfigError(
                f"sliding_window = {size!r} applies to a part of the layers (layer_types or max_window_layers), which "
                "is not supported"
            )
        return size if types[0] == "sliding_attention" else None


def _layer(name: str) -> str:
    return f"model.layers.{{n}}.{name}"


def _linear(
    core: str, names: Sequence[str], shape: tuple[int, int], has_bias: bool, form: Form = "same"
) -> Iterator[Weight]:
    yield Weight(f"{core}.weight", tuple(f"{name}.weight" for name in names), shape, form)
    if has_bias:
        yield Weight(f"{core}.bias", tuple(f"{name}.bias" for name in names), shape[:1], form)


def _head(model: ModelConfig) -> Iterator[Weight]:
    """The output matrix, which tied models do not store."""
    if model.untie_embeddings_and_output_weights:
        shape = (model.padded_vocab_size or 0, model.hidden_size)
        yield Weight("output_layer.weight", ("lm_head.weight",), shape, "vocabulary")


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
    )
}
"""By `model_type`. Of the families that can express a model, export uses the first."""


def family_for(model: ModelConfig, name: str | None = None) -> Family:
    """The family that a resolved `model` is exported as: `name`, or the first that can express it.

    Raises:
        ConfigError: the family, or every family, cannot express it; names the keys of the nearest one.
    """
    candidates = [FAMILIES[name]] if name else list(FAMILIES.values())
    nearest = min(candidates, key=lambda family: len(family.misfits(model)))
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
    model = resolve_model(from_dict(ModelConfig, section, "its model in hpcgen's terms"))
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
