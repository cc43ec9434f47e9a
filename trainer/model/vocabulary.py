"""Rows of the embedding and of the output layer for tokens that a checkpoint does not have."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.model.parameter_names import SHARED_EMBEDDING, global_names

TABLES = (SHARED_EMBEDDING, "output_layer.weight")
"""Parameters with a row for each token: [vocabulary / TP, hidden]."""


@torch.no_grad()
def add_tokens(
    chunks: Iterable[torch.nn.Module], groups: ProcessGroupCollection, before: int, after: int
) -> None:
    """Set the rows of the tokens `before` to `after` - 1 to the mean of those of all earlier tokens. Every rank of a
    tensor-parallel group must call this.

    A random row would take probability from all other tokens (Hewitt 2021, "Initializing New Word Embeddings for
    Pretrained Language Models"); the mean does not by more than a constant. transformers' resize_token_embeddings
    draws from a narrow distribution around the same mean.
    """
    for chunk in chunks:
        for name, table in global_names(chunk):
            if name in TABLES:
                _add_rows(table, groups, before, after)


def _add_rows(table: torch.Tensor, groups: ProcessGroupCollection, before: int, after: int) -> None:
    first = groups.tp.rank() * len(table)
    total = table[: max(0, before - first)].sum(0, dtype=torch.float32)
    torch.distributed.all_reduce(total, group=groups.tp)
    table[max(0, before - first) : max(0, after - first)] = (total / before).to(table.dtype)
