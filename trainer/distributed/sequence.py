"""Which positions of a sequence a context-parallel rank holds."""

from __future__ import annotations

import torch


def zigzag_positions(length: int, rank: int, size: int) -> torch.Tensor:
    """The positions of `rank` among `size`: [length / size], from chunks `rank` and `2 * size - 1 - rank`.

    Cut into 2 x size chunks, an early one (few keys to attend to) goes with a late one (many), so that the
    causal mask leaves all ranks the same work. Megatron-Core and Transformer Engine cut alike.
    `length` must be a multiple of 2 x size.
    """
    chunks = torch.arange(length).view(2 * size, -1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
