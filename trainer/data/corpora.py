"""Opens the pairs of a blend, checks them, and cuts each into the ranges of documents of the splits.

data.split divides each corpus into contiguous ranges of documents: with n documents, a split with the share [a, b) gets
documents round(a x n) to round(b x n), as in Megatron-Core.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy
from megatron.core.datasets.blended_megatron_dataset_config import convert_split_vector_to_split_matrix
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import normalize

from trainer.contract.config import ConfigError, Dataset
from trainer.contract.files.index_header import CHECKED_TOKENS, HEADER_SIZE, bin_path, idx_path, read_header
from trainer.contract.files.regular_file import open_regular
from trainer.contract.resuming.sampling import Documents
from trainer.contract.rules.data import split_weights

SPLITS = ("train", "valid", "test")

Share = tuple[float, float]
"""Range [a, b) of each corpus's documents that a split gets, as fractions."""


def split_shares(split: str) -> dict[str, Share | None]:
    """Share of each split by data.split; None for a split with weight 0."""
    weights = split_weights(split)
    assert weights is not None, split
    return dict(zip(SPLITS, convert_split_vector_to_split_matrix(normalize(list(weights))), strict=True))


def cut(num_documents: int, share: Share) -> tuple[int, int]:
    """The first document of a share and the one after its last, rounded as in Core."""
    first, end = (round(bound * float(num_documents)) for bound in share)
    return first, end


def documents_of_share(corpus: IndexedDataset, share: Share) -> Documents:
    """The documents of a share. Documents with several sequences, such as Megatron-LM's sentences, are not divided."""
    # The array is unaligned, so numpy would copy all of it. bisect reads only a few elements.
    starts = corpus.document_indices
    first, end = (int(starts[bisect.bisect_right(starts, bound) - 1]) for bound in cut(len(corpus), share))
    return Documents(first, end, _tokens(corpus, first, end))


def _tokens(corpus: IndexedDataset, first: int, end: int) -> int:
    return int(corpus.sequence_lengths[first:end].sum(dtype=numpy.int64))


def open_corpora(where: str, datasets: Sequence[Dataset], rows: int) -> dict[str, IndexedDataset]:
    """Open the pairs of a blend, by prefix. `where` is the key that lists them. See `open_corpus`."""
    return {dataset.prefix: open_corpus(where, dataset.prefix, rows) for dataset in datasets}


def open_corpus(where: str, prefix: str, rows: int) -> IndexedDataset:
    """Open a pair, and check that its .bin matches its .idx."""
    for path in (bin_path(prefix), idx_path(prefix)):
        if not path.is_file():
            raise ConfigError(f"{path} is not a file (prefix = {prefix!r})", where=where)
    size = bin_path(prefix).stat().st_size
    if not size:
        raise ConfigError(f"{prefix}.bin is empty", where=where)
    _require_index(where, prefix)
    try:
        corpus = IndexedDataset(prefix)
    except AssertionError as error:
        raise ConfigError(
            f"{prefix}.idx is damaged: its documents do not end where its sequences do", where=where
        ) from error
    tokens = _tokens(corpus, 0, len(corpus))
    if size != (expected := tokens * corpus.index.dtype_size):
        raise ConfigError(
            f"{prefix}.bin has {size:,} bytes, but its .idx describes {expected:,}. The two do not belong "
            "together, or one is truncated; make the pair again",
            where=where,
        )
    if tokens < 2:
        raise ConfigError(f"{prefix}.bin has only one token; at least two are needed", where=where)
    _require_rows(where, prefix, corpus, rows)
    return corpus


def _require_index(where: str, prefix: str) -> None:
    """Refuse an invalid or truncated .idx. Core would fail with one traceback, and with a second one in its cleanup."""
    index = idx_path(prefix)
    with open_regular(index) as file:
        header = read_header(file.read(HEADER_SIZE))
    if header is None:
        raise ConfigError(f"{index} is not a Megatron index", where=where)
    if (size := index.stat().st_size) < header.file_size:
        raise ConfigError(
            f"{index} is truncated: {size:,} of {header.file_size:,} bytes. Make the pair again", where=where
        )


def _require_rows(where: str, prefix: str, corpus: IndexedDataset, rows: int) -> None:
    """Refuse a corpus if its beginning shows that it was made with a different tokenizer. Core would embed unknown IDs
    as zeros."""
    beginning = numpy.fromfile(f"{prefix}.bin", dtype=corpus.index.dtype, count=CHECKED_TOKENS)
    if (largest := int(beginning.max())) >= rows:
        raise ConfigError(
            f"{prefix} contains the token ID {largest}, but the embedding has {rows} rows. "
            "Name the tokenizer that made it (data.tokenizer), or correct model.vocab_size",
            where=where,
        )
