"""Base class of the optimizers. An optimizer decides its keys, its state, and which ranks keep it.

Memory, the size of checkpoints and rules follow from it. trainer/optimizer builds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

Kind = Literal["table", "layer"]
"""layer: parameters of layers. table: embeddings, the output layer and other parameters outside of layers."""

AVERAGE_BYTES = 4
"""Bytes per parameter of the average of weights (training.ema_decay)."""


class Optimizer(ABC):
    """An optimizer with fp32 weights and moments."""

    name: ClassVar[str]
    """Its name in messages."""
    megatron: ClassVar[str]
    """Value of Megatron-LM's --optimizer."""
    keys: ClassVar[tuple[str, ...]]
    """Keys of the section `optimizer` that only this optimizer uses. Megatron-LM has arguments of the same names."""
    sharding: ClassVar[Literal["distributed", "replicated"]]
    """distributed: data-parallel ranks divide the state, and each updates its part of the weights. replicated: each
    rank has the complete state."""
    largest_lr: ClassVar[float]
    """Maximum learning rate with which a GPT can train."""

    @abstractmethod
    def moments(self, kind: Kind) -> tuple[str, ...]:
        """Names of the fp32 tensors that the optimizer keeps for a parameter of `kind`, each in the shape of the
        parameter."""

    @abstractmethod
    def usual_lr(self, parameters: float) -> float:
        """The usual peak learning rate of a GPT with this number of parameters outside its embeddings."""

    @abstractmethod
    def effect_of_lr(self, lr: float) -> str:
        """Effect of a learning rate that is too large, in words."""

    def state_bytes(self, kind: Kind) -> int:
        """Bytes per parameter of `kind`: the fp32 weight and the moments."""
        return 4 * (1 + len(self.moments(kind)))
