"""Latent attention (MLA) with a cache of latents.

The keys and values of all heads follow from the normalized latent of a token and its rotated key, so the cache has
only these. A step with one token per row does not expand them. As q (W c) = (q W) c, it applies the up-projection of
the keys to the queries, and the up-projection of the values to the mean of the latents. All heads then attend to the
same keys. Source: DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, section 2.1.2.

Shapes: s tokens of a step, b rows, S slots, n heads on this tensor-parallel rank, r width of a latent, d other widths.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.contract.config import ModelConfig
from trainer.inference.cache import Cache, Cached, Caching, Rotary
from trainer.model.attention.core import CoreAttention
from trainer.model.attention.latent import LatentAttention
from trainer.model.rotary import attention_factor, inverse_frequencies


class LatentCaching(Caching):
    """A cache of latents and rotated keys."""

    layer = LatentAttention
    can_record = False

    def width(self, core: TransformerConfig, tensor_parallel: int) -> int:
        """All tensor-parallel ranks have the same latents."""
        return int(core.kv_lora_rank + core.qk_pos_emb_head_dim)

    def insert(
        self, chunk: GPTModel, model: ModelConfig, device: torch.device, dtype: torch.dtype
    ) -> tuple[list[Cached], Rotary | None]:
        """Replace the attention of each layer."""
        rotary = _rotary(model, device, dtype)
        found: list[Cached] = []
        for layer in chunk.decoder.layers:
            layer.self_attention = CachedLatentAttention(layer.self_attention, rotary)
            found.append(layer.self_attention)
        return found, rotary


def _rotary(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> Rotary:
    """Rotary embedding of the channels that are rotated, with Core's angles and factor."""
    factor = 1.0 if model.yarn is None else attention_factor(model.yarn)
    return Rotary(inverse_frequencies(model).to(device), dtype, factor)


class CachedLatentAttention(torch.nn.Module):
    """Computes a layer's attention over the tokens of earlier steps and of this one."""

    def __init__(self, attention: LatentAttention, rotary: Rotary) -> None:
        super().__init__()
        self.attention = attention
        self.window: int | None = attention.core_attention.window
        self.cache: Cache | None = None
        """The cache of this step; None to attend only to the tokens of the step."""
        self._rotary = rotary
        config = attention.config
        self._key_widths = [config.qk_head_dim, config.qk_pos_emb_head_dim]
        self._latent_widths = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        up = attention.linear_kv_up_proj.weight.view(
            -1, config.qk_head_dim + config.v_head_dim, config.kv_lora_rank
        )
        self._key_up, self._value_up = up.split([config.qk_head_dim, config.v_head_dim], dim=1)  # [n, d, r]

    @property
    def core_attention(self) -> CoreAttention:
        """The attention over queries, keys and values, where hooks expect it. Steps with the cache do not call it."""
        attention: CoreAttention = self.attention.core_attention
        return attention

    def forward(
        self, hidden: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [s, b, d] -> output [s, b, d] and bias of the layer's attention."""
        if self.cache is not None:
            [stored] = self.cache.store(self.attention.layer_number, self._latents(hidden))
            if self.cache.mask is not None:
                return self.attention.linear_proj(
                    self._attend(self._queries(hidden), stored[:, 0], self.cache.mask)
                )
        return self.attention(hidden, *args, **kwargs)

    def _latents(self, hidden: torch.Tensor) -> torch.Tensor:
        """Latents and rotated keys [s, b, 1, r+d]."""
        compressed, _ = self.attention.linear_kv_down_proj(hidden)
        latent, key = compressed[:, :, None].split(self._latent_widths, dim=-1)
        return torch.cat((self.attention.kv_layernorm(latent), self._rotate(key)), dim=-1)

    def _queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queries of this step's tokens for latents and rotated keys [b, n, r+d]."""
        attention = self.attention
        if attention.config.q_lora_rank is None:
            query, _ = attention.linear_q_proj(hidden)
        else:
            compressed, _ = attention.linear_q_down_proj(hidden)
            query, _ = attention.linear_q_up_proj(attention.q_layernorm(compressed))
        plain, rotated = query.unflatten(-1, (-1, attention.q_head_dim)).split(self._key_widths, dim=-1)
        for_latent = torch.einsum("sbnd,ndr->sbnr", plain, self._key_up)
        return torch.cat((for_latent, self._rotate(rotated)), dim=-1)[0]

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Queries [b, n, r+d], keys [b, S, r+d] and mask [b, 1, 1, S] -> [1, b, n*d]."""
        scores = query @ keys.mT * self.attention.core_attention.scale + mask[:, 0]
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        latents = weights @ keys[..., : self._latent_widths[0]]
        return torch.einsum("bnr,ndr->bnd", latents, self._value_up).flatten(1)[None]

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate [s, b, n, d], whose channels 2i and 2i + 1 are a pair."""
        return self._rotary.rotate(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1))
