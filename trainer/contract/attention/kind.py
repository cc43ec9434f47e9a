"""Base class of the kinds of attention. A kind decides its keys, and the products and norms of a layer.

Memory, numbers of parameters, FLOPs and rules follow from them. trainer/model/attention builds the modules, and rules
about its layouts are in a module of trainer/contract/rules, such as latent_attention.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, NamedTuple

from trainer.contract.config import ModelConfig
from trainer.contract.config.training import RecomputeModule
from trainer.contract.problem import Problem

Activation = Literal["normalized input", "normalized latents", "queries", "keys and values"]
"""Values that the attention of a layer keeps for its backward pass unless they are recomputed."""


class Projection(NamedTuple):
    """A matrix product of an attention layer."""

    name: str
    """Its module in Megatron-Core's layer."""
    inputs: int
    outputs: int
    norm: str | None = None
    """Norm of its input, which Transformer Engine computes in the same module."""
    has_bias: bool = False
    divided: Literal["outputs", "inputs", "none"] = "outputs"
    """The side that tensor parallelism divides. With none, the product is replicated on all ranks."""

    @property
    def weights(self) -> int:
        """Number of weights without the bias."""
        return self.inputs * self.outputs

    def shape(self, tensor_parallel: int) -> tuple[int, int]:
        """Shape of the weight on a rank: outputs and inputs."""
        outputs, inputs = (
            width // tensor_parallel if self.divided == side else width
            for side, width in (("outputs", self.outputs), ("inputs", self.inputs))
        )
        return outputs, inputs


class MatrixWidth(NamedTuple):
    """A width of the matrices on a rank that follows from a key of the section `model`."""

    key: str
    width: int
    how: str = ""
    """Formula that completes the value of the key to the width, such as " x num_attention_heads"."""
    about: tuple[str, ...] = ()
    """The keys that the formula names."""


class Attention(ABC):
    """A kind of attention. Except for `resolve` and `problems`, methods take a resolved model."""

    key: ClassVar[str | None] = None
    """Key of the section `model` that chooses this kind if it is true. None for the kind without a key."""
    keys: ClassVar[tuple[str, ...]] = ()
    """Further keys of the section `model` that only this kind uses."""
    has_complete_heads: ClassVar[bool] = True
    """True if projections compute complete queries and keys, to which qk_layernorm and rope are then applied."""
    recomputable: ClassVar[Mapping[RecomputeModule, tuple[Activation, ...]]] = {}
    """Values of training.recompute_modules that need this kind -> what they recompute in the attention of a layer."""
    has_cuda_graphs: ClassVar[bool] = True
    """True if losses with and without CUDA graphs have been compared."""

    def is_chosen(self, model: ModelConfig) -> bool:
        """True if the section `model` chooses this kind."""
        return self.key is None or bool(getattr(model, self.key))

    @abstractmethod
    def resolve(self, model: ModelConfig) -> ModelConfig:
        """`model` without nulls in kv_channels, add_qkv_bias and the keys of this kind."""

    @abstractmethod
    def problems(self, model: ModelConfig) -> Iterator[Problem]:
        """Keys that contradict this kind, which `model` chooses."""

    @abstractmethod
    def projections(self, model: ModelConfig) -> tuple[Projection, ...]:
        """The matrix products of a layer in their order."""

    @abstractmethod
    def norms(self, model: ModelConfig) -> dict[str, int]:
        """The norms that qk_layernorm adds to a layer, with their widths."""

    @abstractmethod
    def value_width(self, model: ModelConfig) -> int:
        """Width of the values in a head. The width of queries and keys is kv_channels."""

    @abstractmethod
    def rotated_width(self, model: ModelConfig) -> int:
        """Number of channels of queries and keys that rope rotates in a head."""

    def latent_width(self, model: ModelConfig) -> int:
        """Total width of the latents of a token, from which other projections compute queries, keys and values."""
        return 0

    def score_width(self, model: ModelConfig) -> int:
        """Multiplications per pair of a query and a key in all heads: its score, and its product with the value."""
        assert model.kv_channels
        return model.num_attention_heads * (model.kv_channels + self.value_width(model))

    @abstractmethod
    def matrix_widths(self, model: ModelConfig, tensor_parallel: int) -> Iterator[MatrixWidth]:
        """Widths of the matrices on a rank, except hidden_size and multiples of the widths yielded."""
