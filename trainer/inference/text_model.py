"""Interface of a model that continues texts: a loaded one (`trainer.inference.model`), or the one in training."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

import torch

from trainer.contract.config import TrainerConfig

if TYPE_CHECKING:
    from trainer.inference.cache import Cache


class TextModel(Protocol):
    """A model that continues texts. Every rank must make the same calls."""

    config: TrainerConfig
    device: torch.device

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of prompt and continuation."""

    @property
    def follows_documents(self) -> bool:
        """True if the model was trained to begin a document after the end of another document, and to see this end."""

    @property
    def has_cache(self) -> bool:
        """True if a step needs only the last token of each row."""

    @property
    def can_record(self) -> bool:
        """True if a step with the cache can be a CUDA graph."""

    @property
    def replica(self) -> tuple[int, int]:
        """Number of this replica of the model, and the number of replicas."""

    def new_cache(self, num_slots: int) -> Cache | None:
        """An empty cache for sequences of up to `num_slots` tokens."""

    def computing(self, num_rows: int, num_slots: int) -> contextlib.AbstractContextManager[None]:
        """Mode in which texts are computed. Reports in one line that a GPU's memory is too small for a batch."""

    def is_out_of_time(self) -> bool:
        """True if the texts must end now."""

    def next_logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor, cache: Cache | None
    ) -> torch.Tensor | None:
        """See `trainer.inference.model.Model`."""

    def from_last_stage(self, values: torch.Tensor) -> torch.Tensor:
        """The `values` of the ranks of the last stage, on every rank of this replica."""
