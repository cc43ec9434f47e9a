"""Usual attention with a cache of keys and values.

Shapes: s tokens of a step, b rows, S slots, n heads and g query groups on this tensor-parallel rank, d width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.contract.config import ModelConfig
from trainer.inference.cache import Cache, Cached, Caching, Rotary
from trainer.model.attention.core import CoreAttention


class UsualCaching(Caching):
    """A cache of keys and values."""

    layer = SelfAttention
    can_record = True

    def width(self, core: TransformerConfig, tensor_parallel: int) -> int:
        """Keys and values of the query groups on this rank."""
        return 2 * (core.num_query_groups // tensor_parallel) * core.kv_channels

    def insert(
        self, chunk: GPTModel, model: ModelConfig, device: torch.device, dtype: torch.dtype
    ) -> tuple[list[Cached], Rotary | None]:
        """Replace each core_attention, and rotate before it."""
        rotary = None
        if model.position_embedding_type == "rope":
            rotary = Rotary(chunk.rotary_pos_emb.inv_freq.to(device), dtype)
            # Core's layers would compute the cosines and sines again, and count positions from 0 in each step.
            chunk.position_embedding_type = "none"
        found: list[Cached] = []
        for layer in (layer.self_attention for layer in chunk.decoder.layers):
            layer.core_attention = CachedAttention(layer.core_attention, layer.layer_number)
            if rotary is not None:
                rotate(layer, rotary)
            found.append(layer.core_attention)
        return found, rotary


def rotate(layer: SelfAttention, rotary: Rotary) -> None:
    """Make a layer rotate its queries and keys before its attention, where Core's layers do.

    So a hook on the attention sees them as in training.
    """
    project = layer.get_query_key_value_tensors

    def project_and_rotate(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        query, key, *others = project(*args, **kwargs)
        return rotary.rotate(query), rotary.rotate(key), *others

    layer.get_query_key_value_tensors = project_and_rotate


class CachedAttention(torch.nn.Module):
    """Computes a layer's attention over the tokens of earlier steps and of this one."""

    def __init__(self, attention: CoreAttention, layer: int) -> None:
        super().__init__()
        self.attention = attention
        self.layer = layer
        self.scale = attention.scale  # for hooks, as in docs/generation.md
        self.window = attention.window
        self.cache: Cache | None = None
        """The cache of this step; None to attend only to the tokens of the step."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Query [s, b, n, d], key and value [s, b, g, d] -> [s, b, n*d]."""
        if self.cache is None:
            return self.attention(query, key, value)
        keys, values = self.cache.store(self.layer, key, value)
        if self.cache.mask is None:
            return self.attention(query, key, value)
        _, rows, _, width = query.shape
        # The heads of a group take the place of queries: they share keys, values and mask.
        by_group = query[0].reshape(rows, keys.shape[1], -1, width)  # [b, g, n/g, d]
        context = self.attention.attend(by_group, keys, values, self.cache.mask)
        return context.reshape(1, rows, -1)
