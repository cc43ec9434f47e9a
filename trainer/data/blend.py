"""Which documents of which corpora make up training, validation and test data, and with what weights.

Decided from the .idx files before any index is built. By documents (data.split), each corpus is cut into contiguous
ranges: of n documents a split with the shares [a, b) gets those from round(a x n) up to round(b x n), as Megatron-Core
cuts it. A corpus with no document in a split is left out of that split's blend: Core would count its epochs for ever.
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

SPLITS = ("train", "valid", "test")

MOCK_SPLIT = "1,1,1"

LOOKED_AT = 2**20
"""Tokens of each corpus that are compared with the size of the vocabulary."""

MAX_EPOCHS = 1_000_000
"""Core counts the epochs of a corpus one by one, and lists its documents once for each."""

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
"""Of an .idx file: its magic, version, the code of the tokens' type, and how many sequences and documents there are."""

LAST_APART = 0.8
"""Of a last epoch of which less is read, Core shuffles the samples apart from those of the epochs before it."""

Say = Callable[[str], None]
"""Takes one line for the log."""

Share = tuple[float, float]
"""The part of each corpus's documents that a split gets: from and up to."""


@dataclass(frozen=True)
class Documents:
    """A range of the documents of one corpus; as Core does, by their sequences: one each, in pairs for a GPT."""

    first: int
    """The first."""
    end: int
    """The one after the last."""
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a split reads of one corpus."""

    prefix: str | None
    """None for made-up samples."""
    documents: Documents
    weight: float
    """Share of the split's samples; the weights of a split add up to 1."""
    num_samples: int
    """The most samples that the blend draws from it."""


@dataclass(frozen=True)
class Blend:
    """The corpora that a split reads, in the order of the configuration."""

    split: str
    num_samples: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class _Source:
    """The corpora that a split may read, and the share of each corpus's documents that it gets."""

    split: str
    datasets: Sequence[Dataset]
    share: Share | None


def plan_blends(config: TrainerConfig, rows: int, say: Say) -> dict[str, Blend]:
    """The blend of each split that the run reads, by the name of the split.

    `rows` are the embedding's, which must have one for every token. What is left out, and how often the rest is
    read, is said.

    Raises:
        ConfigError: the data is not named in exactly one way, a pair is missing, damaged or of another tokenizer, a
            document would be in two splits, or training or validation would get none.
    """
    data = config.data
    _require_one_way(data)
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
        _require_apart(sources)
    blends = (_blend(source, corpora, config, say) for source in sources if num_samples(config)[source.split])
    return {blend.split: blend for blend in blends if blend is not None}


def num_samples(config: TrainerConfig) -> dict[str, int]:
    """Samples of each split. Every evaluation reads the same ones, so that its losses compare."""
    training = config.training
    evaluation = training.eval_iters * training.global_batch_size
    return {
        "train": total_samples(training),
        "valid": evaluation,
        "test": evaluation,
    }


def split_shares(split: str) -> dict[str, Share | None]:
    """What data.split gives to each split; None for one of weight 0.

    Raises:
        ConfigError: it is not three weights, the first above 0. Core picks digits out of any text.
    """
    try:
        weights = [float(weight) for weight in split.split(",")]
    except ValueError:
        weights = []
    if len(weights) != 3 or min(weights) < 0 or weights[0] == 0 or not math.isfinite(sum(weights)):
        raise ConfigError(
            f"data.split = {split!r} is not three weights, for train, valid and test, with train's above 0"
        )
    return dict(zip(SPLITS, convert_split_vector_to_split_matrix(normalize(weights)), strict=True))


def cut(num_documents: int, share: Share) -> tuple[int, int]:
    """The first document of a share and the one after its last, rounded as Core does it."""
    first, end = (round(bound * float(num_documents)) for bound in share)
    return first, end


def draws(weights: Sequence[float], size: int) -> list[int]:
    """The most samples that a blend of `size` samples draws from each of its corpora.

    Core takes each sample from the corpus that is furthest behind its weight: none gets one ahead of weight x size.
    (Core's builder asks for 0.5% more, and then makes the blend longer than asked: small splits with unequal
    corpora end in its "oversamples".)
    """
    return [math.ceil(weight * size) for weight in weights]


def order_of(num_samples: int, tokens: int, seq_length: int) -> tuple[int, bool]:
    """How often Core lists the documents of a corpus for so many samples, and whether it shuffles the last time apart.

    Its order of samples is drawn from these two and the seed: where they are equal, a longer run reads the same
    samples first. Source: megatron/core/datasets/gpt_dataset.py, _build_document_sample_shuffle_indices.
    """
    epochs = max(1, -(-(num_samples * seq_length + 1) // tokens))
    if epochs == 1:
        return 1, False
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    return epochs, num_samples - before_last < int(LAST_APART * ((tokens - 1) // seq_length))


def reordered(blend: Blend, earlier: int, seq_length: int) -> list[Part]:
    """The parts whose samples come in another order than in the same blend of `earlier` samples."""
    counts = draws([part.weight for part in blend.parts], earlier)
    return [
        part
        for part, count in zip(blend.parts, counts, strict=True)
        if part.prefix is not None
        and order_of(part.num_samples, part.documents.tokens, seq_length)
        != order_of(count, part.documents.tokens, seq_length)
    ]


def _blend(
    source: _Source, corpora: Mapping[str, IndexedDataset], config: TrainerConfig, say: Say
) -> Blend | None:
    """The blend of one split; None for one that the configuration leaves empty, which is said."""
    split, datasets = source.split, source.datasets
    if not datasets:
        say(f"data: {split}: none, since data.{split} is empty")
        return None
    held = _held(source, corpora)
    if not held:
        reason = _reason_for_none(source, corpora, config.data)
        if split == "test":
            say(f"data: warning: {reason}; there will be no test loss")
            return None
        raise ConfigError(reason)
    if left_out := [dataset.prefix for dataset in datasets if dataset.prefix not in held]:
        say(
            f"data: {split}: {len(left_out)} of {len(datasets)} corpora are left out, since data.split = "
            f"{config.data.split!r} gives it no document of theirs; the first is {left_out[0]}"
        )
    used = [dataset for dataset in datasets if dataset.prefix in held]
    weights = normalize([dataset.weight or held[dataset.prefix].tokens for dataset in used])
    wanted = num_samples(config)[split]
    parts = [
        Part(prefix=dataset.prefix, documents=held[dataset.prefix], weight=weight, num_samples=count)
        for dataset, weight, count in zip(used, weights, draws(weights, wanted), strict=True)
    ]
    _say_epochs(split, wanted, parts, config.model.seq_length, say)
    return Blend(split, wanted, tuple(parts))


def _held(source: _Source, corpora: Mapping[str, IndexedDataset]) -> dict[str, Documents]:
    """What the split holds of each corpus, by prefix, without those of which it holds nothing to predict."""
    if source.share is None:
        return {}
    ranges = {
        dataset.prefix: _documents(corpora[dataset.prefix], source.share) for dataset in source.datasets
    }
    return {prefix: documents for prefix, documents in ranges.items() if documents.tokens > 1}


def _say_epochs(split: str, wanted: int, parts: Sequence[Part], seq_length: int, say: Say) -> None:
    epochs = {part.prefix: part.num_samples * seq_length / part.documents.tokens for part in parts}
    most = max(epochs, key=epochs.__getitem__)
    if epochs[most] > MAX_EPOCHS:
        raise ConfigError(
            f"{split} would read {most} {epochs[most]:,.0f} times: {wanted:,} samples of {seq_length} tokens are "
            "asked for; give it more documents, or a smaller weight"
        )
    documents = sum(part.documents.end - part.documents.first for part in parts)
    tokens = sum(part.documents.tokens for part in parts)
    corpora = counted(len(parts), "corpus", "corpora")
    say(
        f"data: {split}: {counted(documents, 'document')} with {tokens:,} tokens of {corpora}; "
        f"{counted(wanted, 'sample')} read {'each' if len(parts) > 1 else 'it'} up to {max(epochs.values()):,.2f} times"
    )


def _reason_for_none(source: _Source, corpora: Mapping[str, IndexedDataset], data: BlendConfig) -> str:
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
    advice += ["name pairs of its own (data.train, data.valid, data.test)"]
    advice += ["set training.eval_iters = 0"] if split == "valid" else []
    return f"data.split = {data.split!r} leaves no document of {of} for {split}: {', or '.join(advice)}"


def _documents(corpus: IndexedDataset, share: Share) -> Documents:
    """The documents of a share. One of several sequences, such as Megatron-LM's sentences, is not torn."""
    starts = (
        corpus.document_indices
    )  # bisect reads a few of them, where numpy would copy all: they are not aligned
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


def _require_one_way(data: BlendConfig) -> None:
    ways = [bool(data.datasets), bool(data.train), data.mock]
    if sum(ways) != 1 or (not data.train and (data.valid or data.test)):
        raise ConfigError(
            "data: exactly one of data.datasets, data.train (with data.valid and data.test) and "
            f"data.mock = true must be given; got datasets: {len(data.datasets)}, train: {len(data.train)}, "
            f"valid: {len(data.valid)}, test: {len(data.test)}, mock: {data.mock}"
        )


def _require_apart(sources: Sequence[_Source]) -> None:
    """Refuses a pair that two splits name, under whatever names: its documents would be in both."""
    seen: dict[tuple[int, int], tuple[str, str]] = {}
    for source in sources:
        for dataset in source.datasets:
            status = Path(f"{dataset.prefix}.bin").stat()
            other, prefix = seen.setdefault((status.st_dev, status.st_ino), (source.split, dataset.prefix))
            if other != source.split:
                raise ConfigError(
                    f"data.{source.split}: {dataset.prefix} is {prefix} of data.{other}: the same documents would be "
                    "in both; name other pairs, or give data.datasets with data.split"
                )


def _open_corpora(where: str, datasets: Sequence[Dataset], rows: int) -> dict[str, IndexedDataset]:
    weights = sum(dataset.weight is not None for dataset in datasets)
    if weights not in (0, len(datasets)):
        raise ConfigError(f"{where}: {weights} of {len(datasets)} datasets have a weight; give all or none")
    return {dataset.prefix: _open_corpus(where, dataset.prefix, rows) for dataset in datasets}


def _open_corpus(where: str, prefix: str, rows: int) -> IndexedDataset:
    """A pair whose .bin is what its .idx says. What is read from it is gone when it is."""
    for extension in (".bin", ".idx"):
        if not Path(prefix + extension).is_file():
            raise ConfigError(f"{where}: {prefix}{extension} is not a file (prefix = {prefix!r})")
    size = Path(f"{prefix}.bin").stat().st_size
    if not size:
        raise ConfigError(f"{where}: {prefix}.bin holds no token")
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
            f"{where}: {prefix}.bin has {size:,} bytes, and its .idx speaks of {expected:,}: the two do not belong "
            "together, or one is cut off; make the pair again"
        )
    if tokens < 2:
        raise ConfigError(f"{where}: {prefix}.bin holds one token, and none that follows it")
    _require_rows(where, prefix, corpus, rows)
    return corpus


def _require_index(where: str, prefix: str) -> None:
    """Refuses an .idx that is none, or is cut off; Core would fail with a traceback, and again as it cleans up."""
    index = Path(f"{prefix}.idx")
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
    try:
        magic, version, dtype_code, sequences, documents = _HEADER.unpack(header)
        DType.dtype_from_code(dtype_code)
    except (struct.error, KeyError, ValueError):
        magic, version, sequences, documents = b"", 0, 0, 0
    if (magic, version) != (_MAGIC, 1):
        raise ConfigError(f"{where}: {index} is not an index of Megatron's")
    # the length and the place of each sequence, and the end of each document
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if (size := index.stat().st_size) < expected:
        raise ConfigError(f"{where}: {index} is cut off: {size:,} of {expected:,} bytes; make the pair again")


def _require_rows(where: str, prefix: str, corpus: IndexedDataset, rows: int) -> None:
    """Refuses a corpus of another tokenizer. A look at its beginning finds one: Core would embed such ids as zeros."""
    beginning = numpy.fromfile(f"{prefix}.bin", dtype=corpus.index.dtype, count=LOOKED_AT)
    if (largest := int(beginning.max())) >= rows:
        raise ConfigError(
            f"{where}: {prefix} holds the token id {largest}, and the embedding has {rows} rows; "
            "name the tokenizer that made it (data.tokenizer), or mend model.vocab_size"
        )
