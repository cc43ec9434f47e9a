"""The interface of a kind of datasets: how samples are made of the documents of a pair."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from trainer.contract.config import BlendConfig, TrainerConfig
from trainer.contract.resuming.sampling import Documents, Order, Packing, Stream
from trainer.data.index_files import Index, LogLine

MAX_PAIRS_SHOWN = 50
"""Maximum number of pairs with a line of their own in the log."""


@dataclass(frozen=True)
class Source:
    """Settings with which the samples of a split are made."""

    config: TrainerConfig
    """Configuration of the split."""
    cache_dir: Path
    """Directory of the index files."""
    vocab_size: int
    """Number of rows of the embedding."""


class Kind(ABC):
    """A kind of datasets."""

    @abstractmethod
    def check_pair(self, prefix: str, corpus: IndexedDataset, data: BlendConfig) -> None:
        """Check that samples can be made of a pair.

        Raises:
            ConfigError: they cannot.
        """

    def pack(
        self, split: str, documents: Mapping[str, Documents], source: Source, log: LogLine
    ) -> dict[str, Packing] | None:
        """Fill samples with complete documents, and build the index files of that. Only one process calls this.

        `documents` are those that `split` reads of each pair, by prefix. Returns the packing of each pair that has
        samples, or None if samples are cut from a continuous stream of documents.

        Raises:
            ConfigError: too few documents fit into a sample.
            OSError: the index files cannot be written.
        """
        return None

    @abstractmethod
    def index(self, split: str, stream: Stream, order: Order, source: Source) -> Index | None:
        """Index files of an order of a stream. None if `dataset` needs none."""

    @abstractmethod
    def dataset(
        self, split: str, stream: Stream, order: Order, source: Source, *, unread: bool = False
    ) -> torch.utils.data.Dataset[Any]:
        """The samples of an order, with `index_split` and `unique_identifiers` as Core's datasets.

        A sample is a dictionary of tensors [s]: tokens, labels and loss_mask, and of a kind that fills samples with
        complete documents IS_FIRST and PADDING (`trainer.data.microbatch`). With `unread`, no
        index file is read, and only the two attributes can be used.
        """

    @abstractmethod
    def documents(self, dataset: torch.utils.data.Dataset[Any], number: int) -> Sequence[int]:
        """Numbers of the documents of sample `number` of a `dataset` of this kind, in the pair."""


def core_split(split: str) -> Split:
    """Core's name of a split. A named validation set is valid."""
    return Split[split.partition("/")[0]]
