"""Llama and the families of Hugging Face models whose layers are like Llama's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.contract.config import ModelConfig
from trainer.contract.families.config_json import contradiction
from trainer.contract.families.model_family import (
    Family,
    Form,
    LayerPrefix,
    Weight,
    head,
    indivisible,
    layer_places,
    odd,
)
from trainer.contract.model import rope_parameters
from trainer.contract.problem import Problem
from trainer.contract.wording import shown

SLIDING, FULL = "sliding_attention", "full_attention"
"""Values of layer_types."""


ROTARY_KEYS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "layernorm_epsilon": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
    "init_method_std": "initializer_range",
}
"""Keys of ModelConfig -> of config.json, in all families with rotary embedding."""

LLAMA_KEYS = ROTARY_KEYS | {"num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"}
"""Keys of ModelConfig -> of config.json, in the families of this module."""


@dataclass(frozen=True, kw_only=True)
class Llama(Family):
    """Llama and the families that differ from it in biases, norms and windows."""

    keys: Mapping[str, str] = field(default_factory=lambda: LLAMA_KEYS)
    biases: tuple[tuple[bool, bool], ...] = ((False, False),)
    """Possible values of (add_bias_linear, add_qkv_bias)."""
    qk_layernorm: bool = False
    """Queries and keys are normalized."""
    window: Literal["", "always", "by layer"] = ""
    """Sliding windows: none; in every layer if `sliding_window` is set; or as `layer_types` and related keys say."""
    head_dim: bool = True
    """config.json may set the width of a head."""
    written = (*Family.written, *rope_parameters.KEYS)

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
        table = (model.padded_vocab_size or 0, model.hidden_size)
        yield Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), table, "vocabulary")
        for place, has_experts in layer_places(model):
            yield from self.attention(model, place)
            yield from self.mlp(model, place, has_experts)
        yield Weight("decoder.final_layernorm.weight", ("model.norm.weight",), (model.hidden_size,))
        yield from head(model)

    def attention(self, model: ModelConfig, place: LayerPrefix) -> Iterator[Weight]:
        """Yields the tensors of attention and of the norm before it."""
        h, d = model.hidden_size, model.kv_channels or 0
        heads, groups = model.num_attention_heads, model.num_query_groups or 0
        core, name = f"{place.core}self_attention", f"{place.name}self_attn"
        yield Weight(f"{core}.linear_qkv.layer_norm_weight", (f"{place.name}input_layernorm.weight",), (h,))
        rows = (heads + 2 * groups) * d
        qkv = tuple(f"{name}.{each}_proj" for each in "qkv")
        yield from linear(f"{core}.linear_qkv", qkv, (rows, h), bool(model.add_qkv_bias), "qkv")
        if self.qk_layernorm:
            for each in "qk":
                yield Weight(f"{core}.{each}_layernorm.weight", (f"{name}.{each}_norm.weight",), (d,))
        yield from linear(f"{core}.linear_proj", (f"{name}.o_proj",), (h, heads * d), model.add_bias_linear)

    def mlp(self, model: ModelConfig, place: LayerPrefix, has_experts: bool) -> Iterator[Weight]:
        """Yields the tensors of a dense MLP and of the norm before it."""
        assert not has_experts
        h = model.hidden_size
        core, name = f"{place.core}mlp", f"{place.name}mlp"
        norm = f"{place.name}post_attention_layernorm.weight"
        yield Weight(f"{core}.linear_fc1.layer_norm_weight", (norm,), (h,))
        yield from gated_mlp(core, name, (h, model.ffn_hidden_size or 0), model.add_bias_linear)

    def to_config(self, model: ModelConfig) -> dict[str, Any]:
        """The keys that all these families share, and the keys of biases and windows."""
        config = super().to_config(model) | {"hidden_act": "silu", **rope_parameters.to_config(model)}
        if not self.head_dim:
            del config["head_dim"]
        if "attention_bias" in {*self.defaults, *self.fixed}:
            config["attention_bias"] = model.add_bias_linear
        if "mlp_bias" in self.defaults:
            config["mlp_bias"] = model.add_bias_linear
        if self.window:
            config["sliding_window"] = model.window_size
        if self.window == "by layer":
            windowed = model.window_size is not None
            kind = SLIDING if windowed else FULL
            config |= {
                "use_sliding_window": windowed,
                "max_window_layers": 0 if windowed else model.num_layers,
                "layer_types": [kind] * model.num_layers,
            }
        return config

    def from_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The model section. Training sequences have the length before the rotary embedding was scaled."""
        linear_bias = bool(config.get("attention_bias"))
        return {
            **super().from_config(config),
            **rope_parameters.from_config(config),
            "window_size": self._window_size(config),
            "qk_layernorm": self.qk_layernorm,
            "normalization": "RMSNorm",
            "swiglu": True,
            "add_bias_linear": linear_bias,
            "add_qkv_bias": next(qkv for linear, qkv in self.biases if linear == linear_bias),
        }

    def contradictions(self, config: Mapping[str, Any]) -> Iterator[Problem]:
        """Yields heads that do not fit, biases in a part of the layers, and windows in a part of the layers."""
        if config["num_key_value_heads"] is not None:
            yield from indivisible(config, "num_attention_heads", "num_key_value_heads")
        if config["head_dim"] is None and self.defaults["head_dim"] is not None:
            yield contradiction({"head_dim": None}, f"has no meaning in {self.architecture}")
        elif config["head_dim"] is None:
            yield from indivisible(config, "hidden_size", "num_attention_heads")
        else:
            yield from odd(config, "head_dim")
        if "mlp_bias" in config and config["mlp_bias"] != config["attention_bias"]:
            biases = {key: config[key] for key in ("attention_bias", "mlp_bias")}
            yield contradiction(biases, "differ, which is not supported")
        if self.window == "by layer":
            yield from self._window_contradictions(config)
        yield from rope_parameters.contradictions(config)

    def _window_contradictions(self, config: Mapping[str, Any]) -> Iterator[Problem]:
        types, num_layers, size = config["layer_types"], config["num_hidden_layers"], config["sliding_window"]
        if types is not None and len(types) != num_layers:
            reason = f"has {len(types)} entries, but num_hidden_layers = {num_layers}"
            yield Problem("layer_types", reason)
        elif unknown := sorted(set(types or ()) - {SLIDING, FULL}):
            reason = f"has {shown(unknown[0])}, which is not supported; only {SLIDING} and {FULL} are"
            yield Problem("layer_types", reason)
        elif SLIDING in (types or ()) and not self._has_window(config):
            used = f"use_sliding_window = {config['use_sliding_window']!r} and sliding_window = {size!r}"
            yield Problem("layer_types", f"has {SLIDING}, but {used}")
        elif len(set(self._layer_types(config))) > 1:
            cause = "layer_types" if types else f"max_window_layers = {config['max_window_layers']}"
            reason = f"applies to a part of the layers ({cause}), which is not supported"
            yield contradiction({"sliding_window": size}, reason)

    def _window_size(self, config: Mapping[str, Any]) -> int | None:
        if self.window == "by layer" and SLIDING not in self._layer_types(config):
            return None
        size: int | None = config["sliding_window"] if self.window else None
        return size

    def _layer_types(self, config: Mapping[str, Any]) -> Sequence[str]:
        """The type of each layer, as in transformers."""
        first = config["max_window_layers"] if self._has_window(config) else config["num_hidden_layers"]
        usual = [SLIDING if n >= first else FULL for n in range(config["num_hidden_layers"])]
        return config["layer_types"] or usual

    def _has_window(self, config: Mapping[str, Any]) -> bool:
        return config["use_sliding_window"] and config["sliding_window"] is not None


def linear(
    core: str, names: Sequence[str], shape: tuple[int, int], has_bias: bool = False, form: Form = "same"
) -> Iterator[Weight]:
    """Yields a matrix and, if it has one, its bias."""
    yield Weight(f"{core}.weight", tuple(f"{name}.weight" for name in names), shape, form)
    if has_bias:
        yield Weight(f"{core}.bias", tuple(f"{name}.bias" for name in names), shape[:1], form)


def gated_mlp(core: str, name: str, sizes: tuple[int, int], has_bias: bool = False) -> Iterator[Weight]:
    """Yields the matrices of an MLP. `sizes` are the sizes of its input and of its hidden layer."""
    width, hidden = sizes
    gate_up = (f"{name}.gate_proj", f"{name}.up_proj")
    yield from linear(f"{core}.linear_fc1", gate_up, (2 * hidden, width), has_bias, "gate_up")
    yield from linear(f"{core}.linear_fc2", (f"{name}.down_proj",), (width, hidden), has_bias)
