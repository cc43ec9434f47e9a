"""The cache of a batch, whose sequences have different lengths, and what a kind of attention does with it.

Sequences are padded at the end: the token at position p of a sequence is always in slot p of its row. A prompt is
computed in one step with the trainer's causal attention. Later steps compute one token per row, whose position is a
tensor on the device, so that a CUDA graph of the step stays valid for later positions. Keys of padding come after all
tokens of their row, so no token attends to them, and the next tokens of the row overwrite them.

Shapes: s tokens of a step, b rows, S slots, n heads and g query groups on this tensor-parallel rank, d width of a head.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.contract.config import ModelConfig


class Cache:
    """Keys and values of all layers for the rows of a batch, or what they are computed from."""

    def __init__(self, num_slots: int, window: int | None, dtype: torch.dtype) -> None:
        self.num_slots = num_slots
        """Maximum length of a sequence."""
        self.mask: torch.Tensor | None = None
        """Mask to add to the scores of this step [b, 1, 1, S]; None while prompts are computed."""
        self._window = window
        self._dtype = dtype
        self._positions = torch.empty(0)
        self._layers: dict[int, tuple[torch.Tensor, ...]] = {}

    def begin_prompts(self) -> None:
        """Begin a step with the tokens of all rows from position 0."""
        self.mask = None

    def begin_step(self, positions: torch.Tensor, num_read: int) -> None:
        """Begin a step with one token per row, at `positions` [b, 1] below `num_read`, the number of slots to read."""
        self._positions = positions[:, None, :, None]
        distance = positions - torch.arange(num_read, device=positions.device)
        visible = distance >= 0 if self._window is None else (distance >= 0) & (distance < self._window)
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=positions.device)
        self.mask = mask.masked_fill_(~visible, -math.inf)[:, None, None]

    def store(self, layer: int, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Add tensors [s, b, g, d] of this step, such as keys and values. Returns the slots to read [b, g, S, d]."""
        by_row = [each.permute(1, 2, 0, 3) for each in new]
        if layer not in self._layers:
            self._layers[layer] = tuple(
                each.new_zeros(*each.shape[:2], self.num_slots, each.shape[-1]) for each in by_row
            )
        stored = self._layers[layer]
        for slots, each in zip(stored, by_row, strict=True):
            if self.mask is None:
                slots[:, :, : each.shape[2]] = each
            else:
                slots.scatter_(2, self._positions.expand(each.shape), each)
        num_read = self.num_slots if self.mask is None else self.mask.shape[-1]
        return tuple(slots[:, :, :num_read] for slots in stored)

    def keep(self, rows: torch.Tensor) -> None:
        """Remove the rows that are not in `rows`."""
        self._layers = {
            layer: tuple(slots[rows] for slots in stored) for layer, stored in self._layers.items()
        }


class Rotary:
    """Rotates queries and keys by the positions of a step. All layers share the cosines and sines."""

    def __init__(self, inv_freq: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
        """`factor` multiplies what is rotated."""
        self._inv_freq = inv_freq
        self._dtype = dtype
        self._factor = factor
        self._cos = self._sin = torch.empty(0)

    def begin(self, positions: torch.Tensor) -> None:
        """Begin a step with tokens at `positions` [b, s], or [1, s] if all rows have the same."""
        angles = positions.t()[:, :, None, None] * self._inv_freq  # [s, b, 1, d/2] in fp32
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        self._cos = torch.cat((cos, cos), dim=-1).to(self._dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(self._dtype)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Queries or keys [s, b, n, d], rotated: channel i and channel i + d/2 are a pair."""
        return torch.addcmul(x * self._cos, x.roll(x.shape[-1] // 2, dims=-1), self._sin)


class Cached(Protocol):
    """The attention of a layer with the cache."""

    window: int | None
    """Number of tokens that a query sees. None for all tokens before it."""
    cache: Cache | None
    """The cache of this step; None to attend only to the tokens of the step."""


class Caching(ABC):
    """How a kind of attention uses the cache."""

    layer: ClassVar[type]
    """The layer's module, whose core_attention is the trainer's."""
    can_record: ClassVar[bool]
    """True if a step was recorded as a CUDA graph."""

    @abstractmethod
    def width(self, core: TransformerConfig, tensor_parallel: int) -> int:
        """Number of values that the cache has on this rank for a token in a layer."""

    @abstractmethod
    def insert(
        self, chunk: GPTModel, model: ModelConfig, device: torch.device, dtype: torch.dtype
    ) -> tuple[list[Cached], Rotary | None]:
        """Put the cache between the layers and their attention. Returns what has it, and what the steps rotate with."""
