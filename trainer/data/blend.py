"""Plans the blends: which documents of each corpus each split reads, and with which weights.

Planning only needs the .idx files and happens before any index is built. data.split divides each corpus into contiguous
ranges of documents: with n documents, a split with the share [a, b) gets documents round(a x n) to round(b x n), as in
Megatron-Core. A corpus without documents in a split is left out of that split's blend, since Core would count its
epochs in an endless loop.
"""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
from megatron.core.datasets.blended_megatron_dataset_config import convert_split_vector_to_split_matrix
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from megatron.core.datasets.utils import normalize

from trainer.contract.batch_size import total_samples
from trainer.contract.config import BlendConfig, ConfigError, Dataset, TrainerConfig
from trainer.contract.wording import counted
from trainer.data.documents import require_ends

SPLITS = ("train", "valid", "test")

MOCK_SPLIT = "1,1,1"

CHECKED_TOKENS = 2**20
"""Number of tokens of each corpus that are compared with the size of the vocabulary."""

MAX_EPOCHS = 1_000_000
"""Maximum number of epochs of a corpus. Core counts them one by one and lists all documents once per epoch."""

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
"""Header of an .idx file: magic, version, code of the token type, number of sequences, number of documents."""

SEPARATE_LAST_EPOCH_BELOW = 0.8
"""Fraction of the last epoch below which Core shuffles its samples separately from the epochs before."""

LogLine = Callable[[str], None]
"""Function that logs one line."""

Share = tuple[float, float]
"""Range [a, b) of each corpus's documents that a split gets, as fractions."""


@dataclass(frozen=True)
class Documents:
    """A range of documents of one corpus, numbered by sequence as in Core. GPT pairs have one sequence per document."""

    first: int
    """First sequence."""
    end: int
    """Last sequence + 1."""
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of one corpus that a split reads."""

    prefix: str | None
    """Prefix of the pair; None for mock samples."""
    documents: Documents
    weight: float
    """Fraction of the split's samples. The weights of a split sum to 1."""
    num_samples: int
    """Maximum number of samples that the blend draws from the corpus."""


@dataclass(frozen=True)
class Blend:
    """Corpora that a split reads, in the order of the configuration."""

    split: str
    num_samples: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class _Source:
    """Configured corpora of a split, and the share of each corpus's documents that it gets."""

    split: str
    datasets: Sequence[Dataset]
    share: Share | None


def plan_blends(config: TrainerConfig, rows: int, log: LogLine) -> dict[str, Blend]:
    """Plan the blend of each split that the run reads, by the name of the split.

    `rows` is the number of rows of the embedding, one for every token ID. The log says which corpora are left out, and
    how many epochs are read from the rest.

    Raises:
        ConfigError: not exactly one data source is given; a pair is missing, damaged or made with another tokenizer; a
            document would be in two splits; or training or validation would have no documents.
    """
    data = config.data
    _require_one_source(data)
    if data.mock:
        return _mock_blends(config)
    if data.datasets:
        shares = split_shares(data.split)
        sources = [_Source(split, data.datasets, shares[split]) for split in SPLITS]
        corpora = _open_corpora("data.datasets", data.datasets, rows)
    else:
        sources = [_Source(split, getattr(data, split), (0.0, 1.0)) for split in SPLITS]
        corpora = {}
        for source in sources:
            corpora |= _open_corpora(f"data.{source.split}", source.datasets, rows)
        _require_disjoint(sources)
    if data.needs_eod:
        for prefix, corpus in corpora.items():
            advice = "Set data.eod_id to the end-of-document token of the corpus, or tokenize it with one"
            require_ends(prefix, corpus, data.eod_id, advice)
    blends = (_blend(source, corpora, config, log) for source in sources if num_samples(config)[source.split])
    return {blend.split: blend for blend in blends if blend is not None}


def num_samples(config: TrainerConfig) -> dict[str, int]:
    """Number of samples of each split. Every evaluation reads the same samples, so that losses are comparable."""
    training = config.training
    evaluation = training.eval_iters * training.global_batch_size
    return {
        "train": total_samples(training),
        "valid": evaluation,
        "test": evaluation,
    }


def split_shares(split: str) -> dict[str, Share | None]:
    """Share of each split by data.split; None for a split with weight 0.

    Raises:
        ConfigError: it is not three weights with the first above 0. Core would accept any text with digits.
    """
    try:
        weights = [float(weight) for weight in split.split(",")]
    except ValueError:
        weights = []
    if len(weights) != 3 or min(weights) < 0 or weights[0] == 0 or not math.isfinite(sum(weights)):
        raise ConfigError(
            f"data.split = {split!r} must be three weights, for train, valid and test, with train's above 0"
        )
    return dict(zip(SPLITS, convert_split_vector_to_split_matrix(normalize(weights)), strict=True))


def cut(num_documents: int, share: Share) -> tuple[int, int]:
    """The first document of a share and the one after its last, rounded as in Core."""
    first, end = (round(bound * float(num_documents)) for bound in share)
    return first, end


def draws(weights: Sequence[float], size: int) -> list[int]:
    """Maximum number of samples that a blend of `size` samples draws from each corpus.

    Core takes each sample from the corpus that is furthest behind its weight, so no corpus gets more than weight x
    size, rounded up. (Core's builder requests 0.5% more, and then makes the blend longer than requested: small splits
    with unequal corpora end in its error "oversamples".)
    """
    return [math.ceil(weight * size) for weight in weights]


def shuffle_key(num_samples: int, tokens: int, seq_length: int) -> tuple[int, bool]:
    """Number of epochs of a corpus that Core shuffles, and whether it shuffles the last one separately.

    These two and the seed determine the order of the samples. If they are equal, a longer run first reads the same
    samples as a shorter one. Source: megatron/core/datasets/gpt_dataset.py, _build_document_sample_shuffle_indices.
    """
    epochs = max(1, -(-(num_samples * seq_length + 1) // tokens))
    if epochs == 1:
        return 1, False
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    samples_per_epoch = (tokens - 1) // seq_length
    return epochs, num_samples - before_last < int(SEPARATE_LAST_EPOCH_BELOW * samples_per_epoch)


def reordered(blend: Blend, earlier: int, seq_length: int) -> list[Part]:
    """Parts whose samples have a different order than in the same blend with `earlier` samples."""
    counts = draws([part.weight for part in blend.parts], earlier)
    return [
        part
        for part, count in zip(blend.parts, counts, strict=True)
        if part.prefix is not None
        and shuffle_key(part.num_samples, part.documents.tokens, seq_length)
        != shuffle_key(count, part.documents.tokens, seq_length)
    ]


def _blend(
    source: _Source, corpora: Mapping[str, IndexedDataset], config: TrainerConfig, log: LogLine
) -> Blend | None:
    """Plan the blend of one split; None, with a line in the log, if the split is empty."""
    split, datasets = source.split, source.datasets
    if not datasets:
        log(f"data: {split}: none, since data.{split} is empty")
        return None
    if source.share is None and split == "test":
        log(f"data: test: none, since data.split = {config.data.split!r} gives it no weight")
        return None
    documents = _documents_by_prefix(source, corpora)
    if not documents:
        reason = _empty_split_reason(source, corpora, config.data)
        if split == "test":
            log(f"data: warning: {reason}. There will be no test loss")
            return None
        raise ConfigError(reason)
    if left_out := [dataset.prefix for dataset in datasets if dataset.prefix not in documents]:
        log(
            f"data: {split}: {len(left_out)} of {len(datasets)} corpora are left out, since data.split = "
            f"{config.data.split!r} leaves none of their documents for it; the first is {left_out[0]}"
        )
    used = [dataset for dataset in datasets if dataset.prefix in documents]
    weights = normalize([dataset.weight or documents[dataset.prefix].tokens for dataset in used])
    wanted = num_samples(config)[split]
    parts = [
        Part(prefix=dataset.prefix, documents=documents[dataset.prefix], weight=weight, num_samples=count)
        for dataset, weight, count in zip(used, weights, draws(weights, wanted), strict=True)
    ]
    _log_epochs(split, wanted, parts, config.model.seq_length, log)
    return Blend(split, wanted, tuple(parts))


def _documents_by_prefix(source: _Source, corpora: Mapping[str, IndexedDataset]) -> dict[str, Documents]:
    """Documents of the split in each corpus, by prefix. Leaves out corpora with fewer than two tokens in the split."""
    if source.share is None:
        return {}
    ranges = {
        dataset.prefix: _documents(corpora[dataset.prefix], source.share) for dataset in source.datasets
    }
    return {prefix: documents for prefix, documents in ranges.items() if documents.tokens > 1}


def _log_epochs(split: str, wanted: int, parts: Sequence[Part], seq_length: int, log: LogLine) -> None:
    epochs = {part.prefix: part.num_samples * seq_length / part.documents.tokens for part in parts}
    most = max(epochs, key=epochs.__getitem__)
    if epochs[most] > MAX_EPOCHS:
        raise ConfigError(
            f"{split} would read {most} for {epochs[most]:,.0f} epochs, since the run needs {wanted:,} samples of "
            f"{seq_length} tokens. Give it more documents or a smaller weight"
        )
    documents = sum(part.documents.end - part.documents.first for part in parts)
    tokens = sum(part.documents.tokens for part in parts)
    corpora = counted(len(parts), "corpus", "corpora")
    largest = f"{'at most ' if len(parts) > 1 else ''}{max(epochs.values()):,.2f}"
    log(
        f"data: {split}: {counted(documents, 'document')} with {tokens:,} tokens in {corpora}; "
        f"{counted(wanted, 'sample')}, {largest} epochs{' of each' if len(parts) > 1 else ''}"
    )


def _empty_split_reason(source: _Source, corpora: Mapping[str, IndexedDataset], data: BlendConfig) -> str:
    split, datasets = source.split, source.datasets
    largest = max((dataset.prefix for dataset in datasets), key=lambda prefix: len(corpora[prefix]))
    count = len(corpora[largest])
    of = f"the {len(datasets)} corpora" if len(datasets) > 1 else largest
    advice = [f"give {split} a larger share"]
    if source.share is not None:
        advice[0] += f" (more than {math.ceil(1e6 / count) / 1e4:g}% of the {count:,} documents of {largest})"
        advice += (
            ["cut the corpus into fewer pairs (data.corpus.num_output_files)"] if len(datasets) > 1 else []
        )
    advice += ["name separate pairs (data.train, data.valid, data.test)"]
    advice += ["set training.eval_iters = 0"] if split == "valid" else []
    return f"data.split = {data.split!r} leaves no document of {of} for {split}; {', or '.join(advice)}"


def _documents(corpus: IndexedDataset, share: Share) -> Documents:
    """The documents of a share. Documents with several sequences, such as Megatron-LM's sentences, are not divided."""
    # The array is unaligned, so numpy would copy all of it. bisect reads only a few elements.
    starts = corpus.document_indices
    first, end = (int(starts[bisect.bisect_right(starts, bound) - 1]) for bound in cut(len(corpus), share))
    return Documents(first, end, _tokens(corpus, first, end))


def _tokens(corpus: IndexedDataset, first: int, end: int) -> int:
    return int(corpus.sequence_lengths[first:end].sum(dtype=numpy.int64))


def _mock_blends(config: TrainerConfig) -> dict[str, Blend]:
    blends = {}
    for split, wanted in num_samples(config).items():
        if wanted:
            documents = Documents(
                *cut(MockGPTLowLevelDataset.size, split_shares(MOCK_SPLIT)[split]), tokens=0
            )
            part = Part(prefix=None, documents=documents, weight=1.0, num_samples=wanted)
            blends[split] = Blend(split, wanted, (part,))
    return blends


def _require_one_source(data: BlendConfig) -> None:
    given = [bool(data.datasets), bool(data.train), data.mock]
    if sum(given) != 1 or (not data.train and (data.valid or data.test)):
        raise ConfigError(
            "data: set exactly one of data.datasets, data.train (with data.valid and data.test) and "
            f"data.mock = true; got datasets: {len(data.datasets)}, train: {len(data.train)}, "
            f"valid: {len(data.valid)}, test: {len(data.test)}, mock: {data.mock}"
        )


def _require_disjoint(sources: Sequence[_Source]) -> None:
    """Refuse a pair that is in two splits, possibly under different names, since its documents would be in both."""
    seen: dict[tuple[int, int], tuple[str, str]] = {}
    for source in sources:
        for dataset in source.datasets:
            status = Path(f"{dataset.prefix}.bin").stat()
            other, prefix = seen.setdefault((status.st_dev, status.st_ino), (source.split, dataset.prefix))
            if other != source.split:
                raise ConfigError(
                    f"data.{source.split}: {dataset.prefix} is the same pair as {prefix} in data.{other}, so its "
                    "documents would be in both. Name other pairs, or use data.datasets with data.split"
                )


def _open_corpora(where: str, datasets: Sequence[Dataset], rows: int) -> dict[str, IndexedDataset]:
    weights = sum(dataset.weight is not None for dataset in datasets)
    if weights not in (0, len(datasets)):
        raise ConfigError(
            f"{where}: {weights} of {len(datasets)} datasets have a weight. Give a weight to all of them or to none"
        )
    return {dataset.prefix: open_corpus(where, dataset.prefix, rows) for dataset in datasets}


def open_corpus(where: str, prefix: str, rows: int) -> IndexedDataset:
    """Open a pair, and check that its .bin matches its .idx."""
    for extension in (".bin", ".idx"):
        if not Path(prefix + extension).is_file():
            raise ConfigError(f"{where}: {prefix}{extension} is not a file (prefix = {prefix!r})")
    size = Path(f"{prefix}.bin").stat().st_size
    if not size:
        raise ConfigError(f"{where}: {prefix}.bin is empty")
    _require_index(where, prefix)
    try:
        corpus = IndexedDataset(prefix)
    except AssertionError as error:
        raise ConfigError(
            f"{where}: {prefix}.idx is damaged: its documents do not end where its sequences do"
        ) from error
    tokens = _tokens(corpus, 0, len(corpus))
    if size != (expected := tokens * corpus.index.dtype_size):
        raise ConfigError(
            f"{where}: {prefix}.bin has {size:,} bytes, but its .idx describes {expected:,}. The two do not belong "
            "together, or one is truncated; make the pair again"
        )
    if tokens < 2:
        raise ConfigError(f"{where}: {prefix}.bin has only one token; at least two are needed")
    _require_rows(where, prefix, corpus, rows)
    return corpus


def _require_index(where: str, prefix: str) -> None:
    """Refuse an invalid or truncated .idx. Core would fail with a traceback, and with another one in its cleanup."""
    index = Path(f"{prefix}.idx")
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
    try:
        magic, version, dtype_code, sequences, documents = _HEADER.unpack(header)
        DType.dtype_from_code(dtype_code)
    except (struct.error, KeyError, ValueError):
        magic, version, sequences, documents = b"", 0, 0, 0
    if (magic, version) != (_MAGIC, 1):
        raise ConfigError(f"{where}: {index} is not a Megatron index")
    # 12 bytes for length and offset of each sequence, 8 bytes for the end of each document
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if (size := index.stat().st_size) < expected:
        raise ConfigError(
            f"{where}: {index} is truncated: {size:,} of {expected:,} bytes. Make the pair again"
        )


def _require_rows(where: str, prefix: str, corpus: IndexedDataset, rows: int) -> None:
    """Refuse a corpus made with another tokenizer, judging by its beginning. Core would embed unknown IDs as zeros."""
    beginning = numpy.fromfile(f"{prefix}.bin", dtype=corpus.index.dtype, count=CHECKED_TOKENS)
    if (largest := int(beginning.max())) >= rows:
        raise ConfigError(
            f"{where}: {prefix} contains the token ID {largest}, but the embedding has {rows} rows. "
            "Name the tokenizer that made it (data.tokenizer), or correct model.vocab_size"
        )
