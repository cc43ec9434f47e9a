"""Samples that are cut from a continuous stream of documents, by Megatron-Core's GPT datasets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from trainer.contract.config import BlendConfig, ConfigError, Dataset
from trainer.contract.files.index_header import idx_path
from trainer.contract.files.loss_mask import kind_problem
from trainer.contract.resuming.sampling import Order, Stream
from trainer.data.corpora import SPLITS
from trainer.data.documents import require_ends
from trainer.data.index_files import Index
from trainer.data.kind import Kind, Source, core_split

PART_FILES = ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")
"""Suffixes of the index files of a GPTDataset (the same in megatron-core 0.16.1 to 0.19)."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer interface that Megatron's datasets need, for data that is already tokenized."""

    vocab_size: int

    eod_id: int | None = None
    """End-of-document token of mock samples. Default: the last token."""

    # No token is padding, since samples are cut from a continuous stream of documents.
    pad = -1

    @property
    def eod(self) -> int:
        """End-of-document token. Core's datasets use it only for mock samples."""
        return self.vocab_size - 1 if self.eod_id is None else self.eod_id

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """Identity of this tokenizer in the key of the index cache."""
        return OrderedDict({"class": "Vocabulary"})


class GptSamples(Kind):
    """Samples from a continuous stream of documents. Each token is predicted."""

    core: ClassVar[type[GPTDataset]] = GPTDataset
    """Core's class. Its name is in the names of index files."""

    def check_pair(self, prefix: str, corpus: IndexedDataset, data: BlendConfig) -> None:
        """Check that documents are no chats, and end with data.eod_id if the trainer must know where they end."""
        if problem := kind_problem(prefix, sft=False, key="data.sft"):
            raise ConfigError(str(problem), where=prefix)
        if data.needs_eod:
            assert data.eod_id is not None
            advice = "Set data.eod_id to the end-of-document token of the corpus, or tokenize it with one"
            require_ends(prefix, corpus, data.eod_id, advice)

    def index(self, split: str, stream: Stream, order: Order, source: Source) -> Index | None:
        """Core's index of an order: its epochs of documents, where samples begin, and their shuffle."""

        def build(directory: Path) -> None:
            documents = numpy.arange(stream.documents.first, stream.documents.end, dtype=numpy.int32)
            self._dataset(split, stream, order, source, dataset_config(source, directory, order), documents)

        named = self.dataset(split, stream, order, source, unread=True)
        prefix = stream.pair["prefix"]
        return Index(
            title=f"{split} of {prefix or 'mock samples'}",
            key=f"{named.unique_description_hash}-{type(named).__name__}-{core_split(split).name}",
            suffixes=PART_FILES,
            source=None if prefix is None else idx_path(prefix),
            build=build,
        )

    def dataset(
        self, split: str, stream: Stream, order: Order, source: Source, *, unread: bool = False
    ) -> GPTDataset:
        """Core's dataset for one order of a corpus."""
        core = dataset_config(source, source.cache_dir, order, defer_npy_index_mmap=unread)
        return self._dataset(split, stream, order, source, core)

    def _dataset(
        self,
        split: str,
        stream: Stream,
        order: Order,
        source: Source,
        core: GPTDatasetConfig,
        documents: numpy.ndarray | None = None,
    ) -> GPTDataset:
        """Core's dataset. Core reads `documents` only to build the index."""
        prefix = stream.pair["prefix"]
        corpus = self.core.build_low_level_dataset(prefix, core)
        return self.core(corpus, prefix, documents, order.num_samples, core_split(split), core)

    def documents(self, dataset: torch.utils.data.Dataset[Any], number: int) -> Sequence[int]:
        """Numbers of the documents that a sample is cut from."""
        assert isinstance(dataset, GPTDataset)
        shuffled = dataset.shuffle_index[number]
        begin, end = dataset.sample_index[shuffled][0], dataset.sample_index[shuffled + 1][0]
        found: list[int] = dataset.document_index[begin : end + 1].tolist()
        return found


class MockSamples(GptSamples):
    """Synthetic samples."""

    core = MockGPTDataset

    def check_pair(self, prefix: str, corpus: IndexedDataset, data: BlendConfig) -> None:
        """There are no pairs."""


def dataset_config(
    source: Source, directory: Path, order: Order | None = None, *, defer_npy_index_mmap: bool = False
) -> GPTDatasetConfig:
    """Core's configuration of a dataset with index files in `directory`. `order` shuffles its samples; a blend has
    none."""
    config = source.config
    return GPTDatasetConfig(
        random_seed=config.training.seed if order is None else order.seed,
        sequence_length=config.model.seq_length,
        path_to_cache=str(directory),
        tokenizer=Vocabulary(source.vocab_size, config.data.eod_id),
        # `trainer.data.loader` does these three.
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        defer_npy_index_mmap=defer_npy_index_mmap,
        **_sources(config.data),
    )


def _sources(data: BlendConfig) -> dict[str, object]:
    """Arguments that name the data, which are part of the cache key. Weights and sizes are passed to each dataset."""

    def prefixes(datasets: Sequence[Dataset]) -> tuple[list[str], None] | None:
        return ([dataset.prefix for dataset in datasets], None) if datasets else None

    if data.mock:
        return {}
    if data.datasets:
        return {"blend": prefixes(data.datasets), "split": data.split}
    return {"blend_per_split": [prefixes(getattr(data, split)) for split in SPLITS]}
