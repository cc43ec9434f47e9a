"""Attention with a cache of keys and values, for batches whose sequences have different lengths.

Sequences are padded at the end: the token at position p of a sequence is always in slot p of its row. A prompt is
computed in one step with the trainer's causal attention. Keys of padding come after all tokens of their row, so no
token attends to them, and the next tokens of the row overwrite them.

Shapes: s tokens of a step, b rows, S slots, n heads and g query groups on this tensor-parallel rank, d width of a head.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.model.layers import CoreAttention


class Cache:
    """Keys and values of all layers for the rows of a batch."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        """Maximum length of a sequence."""
        self.positions = torch.empty(0)
        """Positions of the tokens of this step [b, s]."""
        self.length = 0
        """Number of slots in use after this step."""
        self.is_ragged = False
        """True if the tokens of a step of one token per row are at different positions."""
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values [s, b, g, d] of this step. Returns those of all slots in use [b, g, S, d]."""
        if layer not in self._layers:
            _, rows, groups, width = key.shape
            shape = (rows, groups, self.num_slots)
            self._layers[layer] = key.new_zeros(*shape, width), value.new_zeros(*shape, value.shape[-1])
        stored = self._layers[layer]
        for slots, new in zip(stored, (key, value), strict=True):
            if len(new) > 1:  # a prompt, which begins at position 0
                slots[:, :, : len(new)] = new.permute(1, 2, 0, 3)
            else:
                slots[torch.arange(new.shape[1], device=new.device), :, self.positions[:, 0]] = new[0]
        return stored[0][:, :, : self.length], stored[1][:, :, : self.length]

    def keep(self, rows: torch.Tensor) -> None:
        """Remove the rows that are not in `rows`."""
        self._layers = {layer: (key[rows], value[rows]) for layer, (key, value) in self._layers.items()}

    def visible(self, window: int | None) -> torch.Tensor | None:
        """Slots that the token of each row attends to [b, 1, 1, S]; None for all."""
        if not self.is_ragged and (window is None or window >= self.length):
            return None
        distance = self.positions[:, :1] - torch.arange(self.length, device=self.positions.device)
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return visible[:, None, None, :]


class CachedAttention(torch.nn.Module):
    """Computes a layer's attention over the tokens of earlier steps and of this one."""

    def __init__(self, attention: CoreAttention, layer: int) -> None:
        super().__init__()
        self.attention = attention
        self.layer = layer
        self.cache: Cache | None = None
        """The cache of this step; None to attend only to the tokens of the step."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Query [s, b, n, d], key and value [s, b, g, d] -> [s, b, n*d]."""
        if self.cache is None:
            return self.attention(query, key, value)
        keys, values = self.cache.store(self.layer, key, value)
        if len(query) > 1 or self.cache.length == 1:
            return self.attention(query, key, value)
        _, rows, _, width = query.shape
        # The heads of a group take the place of queries: they share keys, values and mask.
        by_group = query[0].reshape(rows, keys.shape[1], -1, width)  # [b, g, n/g, d]
        context = torch.nn.functional.scaled_dot_product_attention(
            by_group,
            keys,
            values,
            attn_mask=self.cache.visible(self.attention.window),
            scale=self.attention.scale,
        )
        return context.reshape(1, rows, -1)


class Rotary(torch.nn.Module):
    """Rotary angles of the positions of a step, in place of Core's module, which starts each step at position 0."""

    def __init__(self, inv_freq: torch.Tensor) -> None:
        super().__init__()
        self.inv_freq = inv_freq
        self.positions = torch.empty(0)
        """Positions of the tokens of this step [b, s]."""

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Number of positions, which Core passes to `forward`."""
        return self.positions.shape[1]

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Angles in fp32 [s, b, 1, d]."""
        angles = self.positions.t()[:, :, None, None] * self.inv_freq
        return torch.cat((angles, angles), dim=-1)
