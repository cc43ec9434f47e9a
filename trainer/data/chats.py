"""Chats: complete documents of a pair with a loss mask, packed into samples so that an epoch is a number of samples.

A chat of L tokens has L - 1 pairs of an input and its label. So no label crosses the border of two chats, and nothing
needs to be masked there. A sample has chats one after the other and then padding, which no loss and no chat sees.

A chat that does not fit into a sample ends after its last answer that does; without such an answer it is left out.
Each pair is packed once for a sequence length (`trainer.packing`). Each epoch shuffles the samples.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from trainer.contract.config import BlendConfig, ConfigError
from trainer.contract.files.index_header import idx_path
from trainer.contract.files.loss_mask import kind_problem, mask_path, size_problem
from trainer.contract.resuming.sampling import Documents, Order, Packing, Stream
from trainer.contract.wording import counted
from trainer.data.index_files import Index, LogLine, complete
from trainer.data.kind import MAX_PAIRS_SHOWN, Kind, Source, core_split
from trainer.data.microbatch import IS_FIRST, PADDING
from trainer.packing.counts import Counts
from trainer.packing.samples import pack_chats

FILES = ("chats.npy", "bins.npy", "counts.npy")
"""Suffixes of the index files: document and kept tokens of each chat in the order of the samples [chats, 2]; the first
chat of each sample and the end [samples + 1]; and `Counts`."""


class Chats(Kind):
    """Complete chats, of which the answers are learned."""

    def check_pair(self, prefix: str, corpus: IndexedDataset, data: BlendConfig) -> None:
        """Check that a pair has a loss mask that fits, and one sequence per document."""
        if problem := kind_problem(prefix, sft=True, key="data.sft"):
            raise ConfigError(str(problem), where=prefix)
        lengths = corpus.sequence_lengths
        if problem := size_problem(prefix, int(lengths.sum(dtype=numpy.int64))):
            raise ConfigError(problem.sentence, where=prefix)
        if len(corpus.document_indices) - 1 != len(lengths):
            raise ConfigError(
                "some of its documents have several sequences, which Megatron-LM's preprocess_data.py makes with "
                "--split-sentences. A chat must be one sequence",
                where=prefix,
            )

    def pack(
        self, split: str, documents: Mapping[str, Documents], source: Source, log: LogLine
    ) -> dict[str, Packing]:
        """Pack the chats of the pairs, and log how many are cut or left out.

        A pair without samples for the test is left out. Otherwise, it is refused.
        """
        if not documents:
            return {}
        indices = {
            prefix: _packing_index(split, prefix, of_pair, source) for prefix, of_pair in documents.items()
        }
        complete(list(indices.values()), source.cache_dir, log)
        found = {}
        for number, (prefix, index) in enumerate(indices.items()):
            packed = Packed.load(source.cache_dir, index)
            if problem := packed.counts.problem(split, source.config.model.seq_length):
                problem += ". Use a longer model.seq_length, or other chats"
                if split != "test":
                    raise ConfigError(problem, where=prefix)
                log(f"data: warning: {prefix}: {problem}")
                continue
            if number < MAX_PAIRS_SHOWN:
                log(f"data: {split}: {prefix}: {_text(packed, source, split)}")
            found[prefix] = Packing(len(packed), packed.counts.tokens, source.config.data.sft_packing)
        return found

    def index(self, split: str, stream: Stream, order: Order, source: Source) -> Index | None:
        """An order needs no index: `pack` has made that of the pair, and an epoch is shuffled when it is read."""
        return None

    def dataset(
        self, split: str, stream: Stream, order: Order, source: Source, *, unread: bool = False
    ) -> ChatDataset:
        """The samples of an order, whose epochs are complete."""
        index = _packing_index(split, stream.prefix, stream.documents, source)
        packed = None if unread else Packed.load(source.cache_dir, index)
        return ChatDataset(split, stream, order, index.key, packed)

    def documents(self, dataset: torch.utils.data.Dataset[Any], number: int) -> Sequence[int]:
        """Numbers of the chats of a sample."""
        assert isinstance(dataset, ChatDataset)
        return [document for document, _ in dataset.chats(number)]


@dataclass(frozen=True)
class Packed:
    """The packed chats of a pair, mapped from its index files."""

    chats: numpy.ndarray
    """Document in the pair and number of tokens of each chat [chats, 2]."""
    bins: numpy.ndarray
    """First chat of each sample, and the end [samples + 1]."""
    counts: Counts

    def __len__(self) -> int:
        return len(self.bins) - 1

    @classmethod
    def load(cls, directory: Path, index: Index) -> Packed:
        """Map the files of a checked index."""
        chats, bins, counts = (
            numpy.load(directory / name, mmap_mode="r", allow_pickle=False) for name in index.names
        )
        return cls(chats, bins, Counts(*counts.tolist()))


class ChatDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The samples of an order: complete epochs of the packed chats of a pair, each shuffled by itself.

    Next to the tokens, the labels and the loss mask, a sample has `is_first` [s], which is true at the first token of
    each chat and of the padding, and `padding` [], the number of tokens of the padding.
    """

    def __init__(self, split: str, stream: Stream, order: Order, key: str, packed: Packed | None) -> None:
        """`key` is that of the index of the pair, and `packed` its content."""
        self.index_split = core_split(split)
        self.unique_identifiers = OrderedDict(
            {"class": type(self).__name__, "index": key, "seed": order.seed, "samples": stream.length(order)}
        )
        self.dataset_path = stream.prefix
        self._stream, self._order = stream, order
        self._shuffled: tuple[int, numpy.ndarray] | None = None
        if packed is not None:
            self._packed = packed
            self._tokens = IndexedDataset(stream.prefix)
            self._mask = map_mask(stream.prefix)

    def __len__(self) -> int:
        return self._stream.length(self._order)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        length = self._stream.seq_length
        rows = numpy.zeros((4, length), numpy.int64)
        end = 0
        for document, kept in self.chats(number):
            first, end = end, end + kept - 1
            tokens = self._tokens.get(document, 0, kept)
            start = self._tokens.index.sequence_pointers[document] // self._tokens.index.dtype_size
            rows[0, first:end], rows[1, first:end] = tokens[:-1], tokens[1:]
            rows[2, first:end] = self._mask[start + 1 : start + kept]
            rows[3, first] = 1
        if end < length:
            rows[3, end] = 1
        names = ("tokens", "labels", "loss_mask", IS_FIRST)
        sample = dict(zip(names, torch.from_numpy(rows), strict=True))
        return {**sample, PADDING: torch.tensor(length - end)}

    def chats(self, number: int) -> Iterator[tuple[int, int]]:
        """Yields the chats of a sample: the document in the pair, and its number of tokens."""
        epoch, position = divmod(int(number), len(self._packed))
        shuffled = int(self._permutation(epoch)[position])
        first, end = self._packed.bins[shuffled], self._packed.bins[shuffled + 1]
        yield from map(tuple, self._packed.chats[first:end].tolist())

    def _permutation(self, epoch: int) -> numpy.ndarray:
        """The order of the samples of an epoch, which is drawn once while it is read.

        numpy keeps the numbers of RandomState the same in all its versions.
        """
        if self._shuffled is None or self._shuffled[0] != epoch:
            permutation = numpy.random.RandomState([self._order.seed, epoch]).permutation(len(self._packed))
            self._shuffled = epoch, permutation
        return self._shuffled[1]


def _packing_index(split: str, prefix: str, documents: Documents, source: Source) -> Index:
    """Index files of the chats of a pair, which depend on its files, the documents and the settings in the key."""
    seq_length, packed = source.config.model.seq_length, source.config.data.sft_packing
    settings = {
        "prefix": prefix,
        "documents": [documents.first, documents.end],
        "seq_length": seq_length,
        "packed": packed,
    }
    digest = hashlib.md5(json.dumps(settings).encode(), usedforsecurity=False).hexdigest()

    def build(directory: Path) -> None:
        contents = _pack(prefix, documents, seq_length, packed)
        for suffix, content in zip(FILES, contents, strict=True):
            numpy.save(directory / f"{index.key}-{suffix}", content, allow_pickle=False)

    index = Index(
        title=f"the chats of {prefix} for {split}",
        key=f"{digest}-Chats",
        suffixes=FILES,
        source=idx_path(prefix),
        mask=Path(mask_path(prefix)),
        build=build,
    )
    return index


def _pack(prefix: str, documents: Documents, seq_length: int, packed: bool) -> tuple[numpy.ndarray, ...]:
    """The contents of the index files."""
    corpus = IndexedDataset(prefix)
    lengths = numpy.asarray(corpus.sequence_lengths[documents.first : documents.end])
    start = int(corpus.index.sequence_pointers[documents.first]) // corpus.index.dtype_size
    try:
        found = pack_chats(lengths, map_mask(prefix)[start:], seq_length, packed=packed)
    except ValueError as error:
        raise ConfigError(f"{mask_path(prefix)} {error}. Make the pair again", where=prefix) from error
    chats = found.chats + numpy.array([documents.first, 0])
    values = [getattr(found.counts, field.name) for field in fields(Counts)]
    return chats.astype(numpy.int32), found.bins.astype(numpy.int64), numpy.array(values)


def map_mask(prefix: str) -> numpy.ndarray:
    """The loss mask of a pair, mapped from its file [tokens]."""
    return numpy.memmap(mask_path(prefix), numpy.uint8, mode="r")


def _text(packed: Packed, source: Source, split: str) -> str:
    batch = source.config.training.global_batch_size
    steps = f" ({len(packed) / batch:,.1f} steps of {batch:,})" if split == "train" else ""
    counts, length = packed.counts, source.config.model.seq_length
    return "; ".join(
        [
            f"{counted(counts.read, 'chat')} in {counted(len(packed), 'sample')} of {length:,} tokens{steps}, "
            f"{counts.tokens / (len(packed) * length):.1%} full",
            f"{counts.learned / counts.tokens:.1%} of the tokens are learned",
            *counts.left_out(),
        ]
    )
