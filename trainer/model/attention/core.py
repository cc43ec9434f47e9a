"""Attention over queries, keys and values with torch's scaled_dot_product_attention, and what its queries see.

Megatron-Core's own torch attention does not support context parallelism and stores all scores.
Shapes: s sequence on this context-parallel rank, S complete sequence, b microbatch, n heads and g query groups
on this tensor-parallel rank, d width of a head. Values of latent attention have another width than queries and keys.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.contract.attention.visibility import exchange
from trainer.contract.config import TrainerConfig
from trainer.data.documents import document_numbers
from trainer.distributed.sequence import zigzag_positions


def core_arguments(config: TrainerConfig, *, uses_engine: bool) -> dict[str, Any]:
    """Core's arguments for what a query sees, and for how context-parallel ranks exchange it."""
    window = config.model.window_size
    return {
        # Core counts the keys before and after the token, but not the token itself.
        "window_size": None if window is None else (window - 1, 0),
        "cp_comm_type": exchange(config.model, config.parallelism.cp_comm_type) if uses_engine else None,
    }


class CoreAttention(MegatronModule):
    """Causal attention with torch's scaled_dot_product_attention, grouped queries, windows and context parallelism.

    With context parallelism, each rank has two chunks of the sequence (`zigzag_positions`), gathers the keys and values
    of the others, and uses an explicit mask. Windows shorter than the sequence and documents use one too.
    """

    separates_documents = True

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal
        assert attention_type == "self"
        assert pg_collection is not None
        self.cp_group = pg_collection.cp
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale or 1 / math.sqrt(k_channels or config.kv_channels)
        self.window = None if config.window_size is None else config.window_size[0] + 1

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        boundaries: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Query [s, b, n, d], key and value [s, b, g, d] -> [s, b, n*d]. Always causal.

        `boundaries`, in place of Core's attention mask, separates documents (`trainer.data.documents`).
        """
        length, size = query.shape[0], self.cp_group.size()
        window = self.window if self.window is not None and self.window < length * size else None
        mask = None
        if size > 1 or window is not None or boundaries is not None:
            documents = None if boundaries is None else tuple(boundaries.tolist())
            mask = _mask(length, self.cp_group.rank(), size, window, documents, query.dtype, query.device)
        if size > 1:
            key, value = self._gather(key), self._gather(value)  # [S, b, g, d]
        elif query.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
            # Queries that are grouped, rotated or normalized are a copy. If the others stayed views, the backward pass
            # would keep the complete QKV projection. Transformer Engine copies these too (get_qkv_layout).
            key, value = key.contiguous(), value.contiguous()
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = self.attend(query, key, value, mask)  # [b, n, s, d]
        return context.permute(2, 0, 1, 3).flatten(2).contiguous()

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Query [b, n, s, d], key and value [b, g, S, d] -> [b, n, s, d]. Causal without a mask.

        Generation calls this too, for tokens that attend to its cache.
        """
        arguments: dict[str, Any] = {
            "attn_mask": mask,
            "is_causal": mask is None,
            "scale": self.scale,
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        attend = torch.nn.functional.scaled_dot_product_attention
        if not (self.training and self.dropout > 0):
            return attend(query, key, value, **arguments)
        if self.config.sequence_parallel:  # the layer already draws from this rank's own generator
            return attend(query, key, value, dropout_p=self.dropout, **arguments)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return attend(query, key, value, dropout_p=self.dropout, **arguments)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        # All-gather along the sequence; its backward pass is a reduce-scatter.
        return tensor_parallel.gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group)


@functools.lru_cache(maxsize=4)
def _mask(
    length: int,
    rank: int,
    size: int,
    window: int | None,
    boundaries: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Mask to add to the scores: zero for visible keys, -inf for all others. All layers share one mask.

    It has the shape [s, S], or [b, 1, s, S] with the boundaries of documents.
    """
    positions = [zigzag_positions(length * size, rank, size) for rank in range(size)]
    queries, keys = positions[rank], torch.cat(positions)
    distance = queries[:, None] - keys[None, :]
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if boundaries is not None:
        numbers = document_numbers(torch.tensor(boundaries), boundaries[-1] // (length * size))  # [b, S]
        visible = visible & (numbers[:, None, queries, None] == numbers[:, None, None, keys])
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -math.inf).to(device)
