"""Distribution of sequence positions over context-parallel ranks."""

from __future__ import annotations

import torch


def zigzag_positions(length: int, rank: int, size: int) -> torch.Tensor:
    """Positions of `rank` among `size`: [length / size], from chunks `rank` and `2 * size - 1 - rank`.

    The sequence is divided into 2 x size chunks. Each rank has an early chunk (few keys to attend to) and a late chunk
    (many keys), so that all ranks have the same work under the causal mask. Megatron-Core and Transformer Engine divide
    it in the same way. `length` must be a multiple of 2 x size, unless size is 1.
    """
    return zigzag_part(torch.arange(length), rank, size)


def zigzag_part(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The values of `x` [..., length] at the `zigzag_positions` of `rank` among `size`."""
    if size == 1:
        return x
    chunks = x.unflatten(-1, (2 * size, -1))
    return torch.cat([chunks[..., rank, :], chunks[..., 2 * size - 1 - rank, :]], dim=-1)
