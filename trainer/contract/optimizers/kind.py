"""What an optimizer decides: its keys, its state, and where its ranks keep it.

Memory, the size of checkpoints and rules follow from it. What the trainer builds is in trainer/optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

Kind = Literal["table", "layer"]
"""Parameters of layers, or embeddings, the output layer and other parameters outside of layers."""


class Optimizer(ABC):
    """An optimizer with fp32 weights and moments."""

    name: ClassVar[str]
    """Its name in messages."""
    megatron: ClassVar[str]
    """Value of Megatron-LM's --optimizer."""
    keys: ClassVar[tuple[str, ...]]
    """Keys of the section `optimizer` that only this optimizer uses. Megatron-LM has arguments of the same names."""
    sharding: ClassVar[Literal["distributed", "replicated"]]
    """distributed: data-parallel ranks divide the state, and each updates a part of the weights. replicated: each has
    all of it."""
    largest_lr: ClassVar[float]
    """Maximum learning rate that can train a GPT."""

    @abstractmethod
    def moments(self, kind: Kind) -> tuple[str, ...]:
        """Names of the tensors that it keeps for a parameter of `kind` in the parameter's shape, in fp32."""

    @abstractmethod
    def usual_lr(self, parameters: float) -> float:
        """The usual peak learning rate of a GPT with this number of parameters outside its embeddings."""

    @abstractmethod
    def effect_of_lr(self, lr: float) -> str:
        """What a step does to the weights, in words."""

    def state_bytes(self, kind: Kind) -> int:
        """Bytes per parameter of `kind`: the fp32 weight and the moments."""
        return 4 * (1 + len(self.moments(kind)))
