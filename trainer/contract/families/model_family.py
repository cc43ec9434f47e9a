"""Families of Hugging Face models: their tensors, and the keys that they can express."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from trainer.contract.attention import KINDS, SWITCHES
from trainer.contract.config import ModelConfig
from trainer.contract.families.config_json import contradiction
from trainer.contract.model import rope_parameters
from trainer.contract.model.experts import MODEL_KEYS, moe_layer_pattern
from trainer.contract.problem import Problem
from trainer.contract.wording import one_of

Form = Literal["same", "fp32", "vocabulary", "transposed", "gate_up", "qkv", "qkv_conv1d"]
"""How Hugging Face stores a tensor of Megatron-Core: the same; always in fp32; without padding rows; transposed
(Conv1D); as gate and up; as query, key and value; or as one [query | key | value], which Conv1D transposes."""

HEAD = "lm_head.weight"
"""Name of the output matrix in safetensors."""

KIND_KEYS = ("num_moe_experts", *SWITCHES)
"""Keys of the model section that choose a different kind of model."""

DETAILS = {
    "num_moe_experts": MODEL_KEYS,
    **{kind.key: kind.keys for kind in KINDS if kind.key is not None},
    "position_embedding_type": rope_parameters.KEYS,
    "swiglu": ("activation_func",),
    "moe_router_score_function": ("moe_router_pre_softmax",),
    "moe_router_num_groups": ("moe_router_group_topk",),
}
"""Keys of the model section -> keys that matter only with some of its values."""

TRAINING_KEYS = (
    *("seq_length", "padded_vocab_size", "hidden_dropout", "mtp_loss_scaling_factor"),
    *(
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_router_bias_update_rate",
    ),
    *("moe_pad_expert_input_to_capacity", "moe_token_drop_policy"),
)
"""Keys of the model section that do not change what a trained model computes, so config.json need not have them. The
last two matter only with moe_expert_capacity_factor."""

LAYERS = "decoder.layers."
"""Prefix of the tensors that every layer has. In names of Hugging Face, {n} is the number of the layer."""


@dataclass(frozen=True)
class Weight:
    """One tensor of Megatron-Core, and the tensors in which Hugging Face stores it."""

    core: str
    """Name in a torch_dist checkpoint, where the layers are stacked if all have the same tensors."""
    names: tuple[str, ...]
    """Names in safetensors."""
    shape: tuple[int, ...]
    """Shape in Megatron-Core, of one layer and one expert."""
    form: Form = "same"
    expert: int | None = None
    """Number of the expert that has this tensor. Megatron-Core stacks the experts of a layer."""
    num_experts: int = 1

    @property
    def in_layers(self) -> bool:
        """True if the layers have this tensor and are stacked."""
        return self.core.startswith(LAYERS) and not self.core[len(LAYERS)].isdigit()

    def index(self, layer: int) -> tuple[int, ...]:
        """Index of the tensor of a layer in the leading axes, in which it is stacked."""
        of_expert = () if self.expert is None else (self.expert,)
        return (layer, *of_expert) if self.in_layers else of_expert

    def stacked_shape(self, num_layers: int) -> tuple[int, ...]:
        """Shape with the leading axes."""
        experts = () if self.expert is None else (self.num_experts,)
        return (*((num_layers,) if self.in_layers else ()), *experts, *self.shape)


@dataclass(frozen=True)
class LayerPrefix:
    """Beginnings of the names of a layer's tensors."""

    core: str
    """Beginning in a torch_dist checkpoint."""
    name: str
    """Beginning in safetensors files."""


STACKED = LayerPrefix(LAYERS, "model.layers.{n}.")
"""Every layer, if all have the same tensors."""


def layer_places(model: ModelConfig) -> Iterator[tuple[LayerPrefix, bool]]:
    """Yields the places of the layers of a resolved `model`, and whether they have experts.

    Megatron-Core stacks layers only if all have the same tensors.
    """
    pattern = moe_layer_pattern(model)
    if len(set(pattern)) == 1:
        yield STACKED, pattern[0]
        return
    for number, has_experts in enumerate(pattern):
        yield LayerPrefix(f"{LAYERS}{number}.", f"model.layers.{number}."), has_experts


def as_yaml(value: object) -> str:
    """A value as written in a run file."""
    return value if isinstance(value, str) else json.dumps(value, default=dataclasses.asdict)


@dataclass(frozen=True)
class Misfit:
    """A key of the model section that a family cannot express."""

    key: str
    value: Any
    allowed: tuple[Any, ...]

    def described(self, name: str) -> str:
        """The key, called `name`, with its value and the values that it may have."""
        needed = f" (it needs {self.needed})" if self.needed else ""
        return f"{name} = {as_yaml(self.value)}{needed}"

    @property
    def needed(self) -> str:
        """The allowed values, as written in a run file. Empty if there are none."""
        return one_of([as_yaml(value) for value in self.allowed]) if self.allowed else ""

    @property
    def is_of_another_kind(self) -> bool:
        """True if the model has experts and the family has none, or if their kinds of attention differ."""
        return self.key in KIND_KEYS


@dataclass(frozen=True, kw_only=True)
class Family(ABC):
    """A model class of transformers."""

    name: str
    """`model_type` in config.json."""
    architecture: str
    """Class in `architectures`."""
    keys: Mapping[str, str]
    """Keys of ModelConfig -> keys of config.json with the same value."""
    expert_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of ModelConfig -> of config.json that only a model with experts has."""
    defaults: Mapping[str, Any]
    """The keys of config.json that define a model, with transformers' defaults."""
    fixed: Mapping[str, tuple[Any, ...]]
    """Further keys that change the model, with the values that ModelConfig can express. The first is the default."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys in config.json. transformers prefers them."""
    written: ClassVar[tuple[str, ...]] = ("untie_embeddings_and_output_weights",)
    """Further keys of ModelConfig that config.json has in a different form."""

    @abstractmethod
    def expresses(self, model: ModelConfig) -> dict[str, tuple[Any, ...]]:
        """For each key of the model section that the family restricts, the values that it can express."""

    @abstractmethod
    def weights(self, model: ModelConfig) -> Iterator[Weight]:
        """Yields the tensors of a resolved `model`, in their usual order."""

    def to_config(self, model: ModelConfig) -> dict[str, Any]:
        """The keys of config.json that define the resolved `model`."""
        return {name: getattr(model, key) for key, name in self.keys.items()}

    def from_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The model section, from a complete config.json without contradictions."""
        return {key: config[name] for key, name in self.keys.items()} | {
            "untie_embeddings_and_output_weights": not config["tie_word_embeddings"]
        }

    def name_in_config(self, key: str) -> str:
        """Name in config.json of a key of ModelConfig; the same name if config.json does not have the key."""
        return {**self.keys, **self.expert_keys}.get(key, key)

    @abstractmethod
    def contradictions(self, config: Mapping[str, Any]) -> Iterator[Problem]:
        """Yields the keys of a complete config.json that contradict each other or describe a different kind of
        model."""

    def stored(self, model: ModelConfig, names: Collection[str]) -> ModelConfig:
        """`model` without parts that config.json names although no tensor in `names` belongs to them."""
        return model

    def copies(self, model: ModelConfig) -> dict[str, str]:
        """Names of tensors that files may have although they are copies -> names of their originals."""
        return {} if model.untie_embeddings_and_output_weights else {HEAD: self.output(model)}

    def output(self, model: ModelConfig) -> str:
        """Name of the tensor that computes the logits: the head, or the embedding of a tied model."""
        *_, last = (weight for weight in self.weights(model) if weight.form == "vocabulary")
        return last.names[0]

    def misfits(self, model: ModelConfig) -> list[Misfit]:
        """The keys of a resolved `model` that the family cannot express.

        They include keys that no part of the family names, unless they have their defaults. So a new key is refused
        until a family carries it. Keys that matter only because of a listed one are left out.
        """
        carried = {*self.keys, *self.expert_keys, *self.written, *TRAINING_KEYS}
        fields = (field for field in dataclasses.fields(model) if field.name not in carried)
        expressed = {field.name: (field.default,) for field in fields} | self.expresses(model)
        misfits = [
            Misfit(key, getattr(model, key), allowed)
            for key, allowed in expressed.items()
            if getattr(model, key) not in allowed
        ]
        details = {key for misfit in misfits for key in DETAILS.get(misfit.key, ())}
        return [misfit for misfit in misfits if misfit.key not in details]


def in_order(family: Family, model: ModelConfig) -> Iterator[tuple[Weight, int]]:
    """Yields each tensor of a resolved `model` with the number of its layer, layer by layer."""
    weights = list(family.weights(model))
    in_layers = [weight for weight in weights if weight.in_layers]
    first = weights.index(in_layers[0]) if in_layers else len(weights)
    yield from ((weight, 0) for weight in weights[:first])
    yield from ((weight, layer) for layer in range(model.num_layers) for weight in in_layers)
    yield from ((weight, 0) for weight in weights[first + len(in_layers) :])


def indivisible(config: Mapping[str, Any], key: str, by: str) -> Iterator[Problem]:
    """Yields a contradiction if a key of config.json is not a multiple of another one."""
    if config[key] % config[by]:
        yield contradiction({key: config[key]}, f"is not a multiple of {by} = {config[by]}")


def odd(config: Mapping[str, Any], key: str) -> Iterator[Problem]:
    """Yields a contradiction if the width of the rotated part of a head is odd."""
    if config[key] % 2:
        yield contradiction({key: config[key]}, "is odd, but the rotary embedding needs pairs")


def head(model: ModelConfig) -> Iterator[Weight]:
    """The output matrix, which tied models do not store."""
    if model.untie_embeddings_and_output_weights:
        shape = (model.padded_vocab_size or 0, model.hidden_size)
        yield Weight("output_layer.weight", (HEAD,), shape, "vocabulary")
