"""Transformer Engine's attention within documents. Import this module only if Transformer Engine is installed."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.model.packing import Pieces, attend_packed


class PackedAttention(TEDotProductAttention):
    """Causal attention that takes the boundaries of documents in place of a mask (`trainer.data.documents`).

    Without boundaries, each sample is one document.
    """

    separates_documents = True

    def __init__(
        self, *args: Any, pg_collection: ProcessGroupCollection | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, pg_collection=pg_collection, **kwargs)
        assert pg_collection is not None
        self._cp_group = pg_collection.cp
        self.set_context_parallel_group(None, None, None)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        boundaries: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Query [s, b, n, d], key and value [s, b, g, d] -> [s, b, n*d]."""
        return attend_packed(query, key, value, boundaries, self._cp_group, self._attend)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: Pieces
    ) -> torch.Tensor:
        # Core's forward has no name for the mask that is aligned with the last key of a piece.
        context: torch.Tensor = super(TEDotProductAttention, self).forward(
            query, key, value, **pieces.arguments()
        )
        return context
