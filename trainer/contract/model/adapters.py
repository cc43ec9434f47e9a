"""Linear layers of a model that can have LoRA adapters, and the shapes of these adapters.

An adapter has a part for each matrix that Hugging Face stores separately. So linear_qkv has the parts q, k and v, and
linear_fc1 of a gated MLP has gate and up. Adapters of PEFT then have the same parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from trainer.contract.attention import attention_of
from trainer.contract.config import LoraConfig, ModelConfig
from trainer.contract.model.experts import moe_layer_pattern

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Megatron-Core's names of the linear layers that can have an adapter."""

PEFT_NAMES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn"), ("linear_qkv",)),
    "o_proj": ("linear_proj",),
    "c_proj": ("linear_proj", "linear_fc2"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "c_fc", "w1", "w3"), ("linear_fc1",)),
    **dict.fromkeys(("down_proj", "w2"), ("linear_fc2",)),
    "all-linear": LINEARS,
}
"""Names in target_modules of PEFT -> the linear layers that compute these modules of Hugging Face's models."""


WITHOUT_ADAPTERS = LoraConfig()


class Part(NamedTuple):
    """A part of an adapter, with lora_A [rank, inputs] and lora_B [outputs, rank] for the complete layer."""

    name: str
    inputs: int
    outputs: int


class Linear(NamedTuple):
    """A linear layer that can have an adapter, or the same linear layer of all experts of a transformer layer."""

    name: str
    """Name in the complete model, such as decoder.layers.0.mlp.linear_fc1. That of experts has no number of an expert:
    decoder.layers.0.mlp.experts.linear_fc1."""
    parts: tuple[Part, ...]
    divided: Literal["outputs", "inputs"]
    """The side of the weight that tensor parallelism divides."""
    num_experts: int | None = None
    """Number of experts, each of which has an adapter. None for a layer that is not part of experts."""

    def parameter_count(self, rank: int) -> int:
        """Number of parameters of the adapters of this rank, over all experts."""
        return (self.num_experts or 1) * sum(rank * (part.inputs + part.outputs) for part in self.parts)

    @property
    def layer(self) -> int:
        """Number of its transformer layer, from 0."""
        return int(self.name.split(".")[2])

    @property
    def module_names(self) -> list[str]:
        """Names of the modules in the complete model: one, or one for each expert."""
        if self.num_experts is None:
            return [self.name]
        layer, _, kind = self.name.rpartition(".")
        return [f"{layer}.local_experts.{expert}.{kind}" for expert in range(self.num_experts)]

    @property
    def kind(self) -> str:
        """Megatron-Core's name of the linear layer, one of LINEARS."""
        return self.name.rpartition(".")[2]


def advice_for_peft(named: Sequence[str], kinds: Collection[str] = LINEARS) -> str:
    """Correction of lora.target_modules, some of whose entries are names of PEFT. Empty if none is, or if a model
    with linear layers of these `kinds` has none of them."""
    if "all-linear" in named:
        return "remove it: by default, all linear layers have adapters"
    chosen = dict.fromkeys(kind for name in named for kind in PEFT_NAMES.get(name, (name,)))
    if chosen.keys() == set(named) or not any(kind in chosen for kind in kinds):
        return ""
    known = ", ".join(name for name in chosen if name in kinds or name not in LINEARS)
    has_part = bool({"q_proj", "k_proj", "v_proj"} & set(named))
    note = ", where linear_qkv has adapters for q, k and v" if has_part else ""
    return f"use Megatron-Core's names: [{known}]{note}"


def linears(model: ModelConfig) -> Iterator[Linear]:
    """Yields the linear layers of the resolved `model` that can have an adapter, in their order.

    Down- and up-projections of latent attention are not among them.
    """
    for number, has_experts in enumerate(moe_layer_pattern(model)):
        yield from layer_linears(model, number, has_experts=has_experts)


def layer_linears(model: ModelConfig, number: int, *, has_experts: bool) -> Iterator[Linear]:
    """Yields the `linears` of the transformer layer `number`, counted from 0."""
    layer = f"decoder.layers.{number}"
    yield from _of_attention(model, f"{layer}.self_attention")
    if not has_experts:
        yield from _of_mlp(model, f"{layer}.mlp", model.ffn_hidden_size)
        return
    yield from _of_mlp(model, f"{layer}.mlp.experts", model.moe_ffn_hidden_size, model.num_moe_experts)
    if model.moe_shared_expert_intermediate_size is not None:
        yield from _of_mlp(model, f"{layer}.mlp.shared_experts", model.moe_shared_expert_intermediate_size)


def targets(lora: LoraConfig, model: ModelConfig) -> list[Linear]:
    """The linear layers of the resolved `model` that have adapters."""
    return [linear for linear in linears(model) if is_target(lora, linear.name)]


def outside_of_experts(model: ModelConfig) -> tuple[str, ...]:
    """Entries of lora.target_modules that choose all linear layers except those of routed experts."""
    found = dict.fromkeys(_entry(linear) for linear in linears(model) if linear.num_experts is None)
    return tuple(found)


def _entry(linear: Linear) -> str:
    """An entry that also chooses linear layers of other transformer layers, but none of routed experts."""
    if ".mlp." not in linear.name:
        return linear.kind
    return f"*.{linear.name.split('.', 3)[3]}"


def is_target(lora: LoraConfig, name: str) -> bool:
    """True if the linear layer `name` has an adapter."""
    if lora.target_modules is None:
        return True
    return any(matches(pattern, name) for pattern in lora.target_modules)


def matches(pattern: str, name: str) -> bool:
    """True if an entry of lora.target_modules chooses the linear layer `name`. A name in LINEARS chooses it in all
    transformer layers."""
    return fnmatchcase(name.rpartition(".")[2] if pattern in LINEARS else name, pattern)


def active_parameter_counts(lora: LoraConfig, model: ModelConfig) -> list[float]:
    """Adapters' parameters that process a token, by layer of the resolved `model`: of experts, those of the chosen."""
    counts = [0.0] * model.num_layers
    for linear in targets(lora, model):
        share = model.moe_router_topk / linear.num_experts if linear.num_experts else 1
        counts[linear.layer] += share * linear.parameter_count(lora.rank or 0)
    return counts


def adapter_parameter_count(lora: LoraConfig, model: ModelConfig) -> int:
    """Number of parameters of all adapters of the resolved `model`. 0 without adapters."""
    if lora.rank is None:
        return 0
    return sum(linear.parameter_count(lora.rank) for linear in targets(lora, model))


def adapter_parameter_names(lora: LoraConfig, model: ModelConfig) -> list[str]:
    """Names of the parameters of all adapters of the resolved `model`, as trainer/lora/adapter.py makes them."""
    return [
        f"{name}.adapter.{part.name}.{matrix}"
        for linear in targets(lora, model)
        for name in linear.module_names
        for part in linear.parts
        for matrix in ("lora_A", "lora_B")
    ]


def _of_attention(model: ModelConfig, prefix: str) -> Iterator[Linear]:
    heads, groups, width = model.num_attention_heads, model.num_query_groups or 0, model.kv_channels or 0
    for product in attention_of(model).projections(model):
        name = f"{prefix}.{product.name}"
        if product.name == "linear_qkv":
            outputs = {"q": heads * width, "k": groups * width, "v": groups * width}
            parts = tuple(Part(part, product.inputs, size) for part, size in outputs.items())
            yield Linear(name, parts, "outputs")
        elif product.name == "linear_proj":
            yield Linear(name, (Part("o", product.inputs, product.outputs),), "inputs")


def _of_mlp(
    model: ModelConfig, prefix: str, width: int | None, num_experts: int | None = None
) -> Iterator[Linear]:
    assert width
    names = ("gate", "up") if model.swiglu else ("up",)
    inputs = tuple(Part(part, model.hidden_size, width) for part in names)
    yield Linear(f"{prefix}.linear_fc1", inputs, "outputs", num_experts)
    yield Linear(f"{prefix}.linear_fc2", (Part("down", width, model.hidden_size),), "inputs", num_experts)
