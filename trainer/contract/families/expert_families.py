"""Families of Hugging Face models whose layers have experts: Mixtral, and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.contract.config import ModelConfig
from trainer.contract.families.config_json import contradiction
from trainer.contract.families.llama_families import Llama, linear
from trainer.contract.families.model_family import LayerPrefix, Weight
from trainer.contract.model.experts import moe_layer_pattern
from trainer.contract.problem import Problem

A_NUMBER = "a number"
"""Placeholder in a message for the values that a family can express."""


@dataclass(frozen=True)
class ExpertNames:
    """Names of the tensors of an MoE layer in safetensors, after the layer's."""

    router: str
    experts: str
    gate: str
    up: str
    down: str


def experts(model: ModelConfig, place: LayerPrefix, names: ExpertNames) -> Iterator[Weight]:
    """Yields the tensors of router and experts, and of the norm before them. Megatron-Core stacks the experts."""
    h, number, width = model.hidden_size, model.num_moe_experts or 0, model.moe_ffn_hidden_size or 0
    norm = f"{place.name}post_attention_layernorm.weight"
    yield Weight(f"{place.core}pre_mlp_layernorm.weight", (norm,), (h,))
    yield from linear(f"{place.core}mlp.router", (f"{place.name}{names.router}",), (number, h))
    core = f"{place.core}mlp.experts.experts"
    for expert in range(number):
        prefix = f"{place.name}{names.experts}.{expert}."
        gate_up = (f"{prefix}{names.gate}.weight", f"{prefix}{names.up}.weight")
        where = {"expert": expert, "num_experts": number}
        yield Weight(f"{core}.linear_fc1.weight", gate_up, (2 * width, h), "gate_up", **where)
        yield Weight(
            f"{core}.linear_fc2.weight", (f"{prefix}{names.down}.weight",), (h, width), "same", **where
        )


@dataclass(frozen=True, kw_only=True)
class ExpertLlama(Llama):
    """A family whose layers are Llama's with experts that softmax chooses, without shared experts."""

    names: ExpertNames
    has_dense_layers: bool = False
    """Some layers may be dense. Their width then has a separate key."""
    normalizes: tuple[bool, ...] = (True,)
    """True: the weights of the chosen experts are divided by their sum. Lists the values that the family supports."""

    def expresses(self, model: ModelConfig) -> dict[str, tuple[Any, ...]]:
        """The values of Llama models, and the values of experts. Excludes shared experts, groups and capacities."""
        softmax = tuple(not normalizes for normalizes in self.normalizes)
        return super().expresses(model) | {
            "num_moe_experts": (model.num_moe_experts or A_NUMBER,),
            "moe_layer_freq": (model.moe_layer_freq,) if self.has_dense_layers else (None,),
            "moe_shared_expert_intermediate_size": (None,),
            "moe_router_score_function": ("softmax",),
            "moe_router_pre_softmax": softmax,
            "moe_router_topk_scaling_factor": (None, 1.0),
            "moe_router_num_groups": (None,),
            "moe_expert_capacity_factor": (None,),
        }

    def mlp(self, model: ModelConfig, place: LayerPrefix, has_experts: bool) -> Iterator[Weight]:
        """Yields the tensors of the experts, or of a dense MLP."""
        if has_experts:
            yield from experts(model, place, self.names)
        else:
            yield from super().mlp(model, place, has_experts)

    def to_config(self, model: ModelConfig) -> dict[str, Any]:
        """Llama's keys, and the keys of experts."""
        config = super().to_config(model)
        if not self.has_dense_layers:
            return config
        dense = [layer for layer, has_experts in enumerate(moe_layer_pattern(model)) if not has_experts]
        return config | {
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
            "norm_topk_prob": not model.moe_router_pre_softmax,
        }

    def from_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Llama's section, and the keys of experts."""
        section = super().from_config(config)
        if not self.has_dense_layers:
            return section
        layers = _layers_with_experts(config)
        return section | {
            "moe_layer_freq": None if all(layers) else layers,
            "moe_router_pre_softmax": not config["norm_topk_prob"],
        }

    def contradictions(self, config: Mapping[str, Any]) -> Iterator[Problem]:
        """Also yields a model without experts."""
        yield from super().contradictions(config)
        if self.has_dense_layers and not any(_layers_with_experts(config)):
            keys = ("mlp_only_layers", "decoder_sparse_step")
            reason = "leave no layer with experts, which is not supported"
            yield contradiction({key: config[key] for key in keys}, reason)


def _layers_with_experts(config: Mapping[str, Any]) -> list[int]:
    """For each layer, 1 if the layer has experts and 0 if it is dense."""
    dense, step = set(config["mlp_only_layers"] or ()), config["decoder_sparse_step"]
    return [
        int(layer not in dense and (layer + 1) % step == 0) for layer in range(config["num_hidden_layers"])
    ]
