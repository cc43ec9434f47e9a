"""Megatron-Core's GPT datasets for training, validation and test, opened from index files that rank 0 has checked.

This uses Core's dataset classes, so the samples and the names of the index files are Core's. It does not use Core's
builder, whose ranks wait in barriers forever if rank 0 fails, which writes its files in place, and which uses the
same corpora for every split of a blend.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from trainer.contract.config import BlendConfig, Dataset, TrainerConfig
from trainer.contract.resuming.sampling import Order, Sampling, Stream
from trainer.contract.validation import config_of_split
from trainer.data.blend import Blend, Blends, LogLine, Part, plan_blends
from trainer.data.corpora import SPLITS
from trainer.data.index_files import Index, complete
from trainer.data.kinds import Kind, kind_of
from trainer.data.progress import Progress
from trainer.data.replay import counts
from trainer.faults.storage import at_rank_0

PART_FILES = ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")
"""Suffixes of the index files of a GPTDataset (the same in megatron-core 0.16.1 to 0.19)."""

BLEND_FILES = ("description.txt", "dataset_index.npy", "dataset_sample_index.npy")
"""Suffixes of the index files of a BlendedDataset."""

log_to_stdout: LogLine = functools.partial(print, flush=True)


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


class Continuation(torch.utils.data.Dataset):
    """The samples of a stream from `start` on, as a dataset for Core's blends."""

    def __init__(self, orders: Sequence[GPTDataset], stream: Stream, start: int) -> None:
        """`orders` are the datasets of the stream's orders."""
        self._orders, self._start, self._ends = orders, start, stream.ends
        self.index_split = orders[0].index_split
        self.unique_identifiers = OrderedDict(
            {
                "class": type(self).__name__,
                "orders": [order.unique_identifiers for order in orders],
                "start": start,
            }
        )

    def __len__(self) -> int:
        return self._ends[-1] - self._start

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        dataset, number = self.locate(sample)
        return dataset[number]

    def locate(self, sample: int) -> tuple[GPTDataset, int]:
        """The order that has a sample, and its number there."""
        position = self._start + int(sample)
        order = bisect.bisect_right(self._ends, position)
        return self._orders[order], position - (self._ends[order - 1] if order else 0)


class Numbered(torch.utils.data.Dataset):
    """A phase of the run, whose samples have the numbers from `first` on."""

    def __init__(self, dataset: torch.utils.data.Dataset, first: int) -> None:
        self.dataset, self.first = dataset, first

    def __len__(self) -> int:
        return self.first + len(self.dataset)

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        return self.dataset[sample - self.first]


class Consecutive(torch.utils.data.Dataset):
    """The stages of a run. Each dataset has the samples up to the end of its stage, by their numbers in the run."""

    def __init__(self, datasets: Sequence[torch.utils.data.Dataset], ends: Sequence[int]) -> None:
        """`ends` are the numbers of the first samples after each stage."""
        self.datasets, self._ends = datasets, ends

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        return self.reading(sample)[sample]

    def reading(self, sample: int) -> torch.utils.data.Dataset:
        """The dataset of the stage that reads a sample."""
        return self.datasets[bisect.bisect_right(self._ends, sample)]


def located(dataset: torch.utils.data.Dataset, sample: int) -> tuple[GPTDataset, int]:
    """Core's dataset that a sample of a training set comes from, and the sample's number in it."""
    while not isinstance(dataset, GPTDataset):
        if isinstance(dataset, Consecutive):
            dataset = dataset.reading(sample)
        elif isinstance(dataset, Numbered):
            dataset, sample = dataset.dataset, sample - dataset.first
        elif isinstance(dataset, BlendedDataset):
            part = dataset.datasets[dataset.dataset_index[sample]]
            dataset, sample = part, int(dataset.dataset_sample_index[sample])
        else:
            assert isinstance(dataset, Continuation)
            dataset, sample = dataset.locate(sample)
    return dataset, sample


class Reading:
    """Counts what the run has read of each pair, for its checkpoints."""

    def __init__(
        self, blends: Sequence[Blend], dataset: torch.utils.data.Dataset | None, consumed: int
    ) -> None:
        """`dataset` belongs to the training `blends`. The run has read `consumed` samples."""
        datasets = dataset.datasets if isinstance(dataset, Consecutive) else [dataset]
        self._left = list(zip(blends, datasets, strict=True))
        self._consumed, self._sampling = consumed, blends[0].sampling

    def at(self, consumed: int) -> Sampling | None:
        """The state after `consumed` samples, which do not become fewer from call to call. None for mock data."""
        if self._sampling is None:
            return None
        while (end := self._left[0][0].end) < consumed:
            self._advance(end)
            self._left.pop(0)
            self._sampling = self._left[0][0].sampling
        self._advance(consumed)
        return self._sampling

    def _advance(self, end: int) -> None:
        assert self._sampling is not None
        blend, dataset = self._left[0]
        inner = dataset.dataset if isinstance(dataset, Numbered) else dataset
        read = [end - self._consumed]
        if isinstance(inner, BlendedDataset):
            index = inner.dataset_index[self._consumed - blend.first : end - blend.first]
            read = counts(index, len(blend.parts))
        self._sampling = self._sampling.advanced(read)
        self._consumed = end


def build_datasets(
    config: TrainerConfig,
    cache_dir: Path,
    vocab_size: int,
    is_needed: bool,
    log: LogLine = log_to_stdout,
    progress: Progress | None = None,
) -> dict[str, torch.utils.data.Dataset | None]:
    """Datasets of the splits that have data, by name. Every rank must call this. See `plan` and `open_datasets`."""
    return open_datasets(
        plan(config, cache_dir, vocab_size, log, progress), config, cache_dir, vocab_size, is_needed
    )


def plan(
    config: TrainerConfig,
    cache_dir: Path,
    vocab_size: int,
    log: LogLine = log_to_stdout,
    progress: Progress | None = None,
) -> Blends:
    """Blends of the splits that have data, by name. Every rank must call this, and rank 0 builds the index files.

    `log` logs on rank 0.

    Raises:
        ConfigError: see `plan_blends`.
        TrainerError: the index files cannot be written.
    """
    return at_rank_0(lambda: build_index(config, cache_dir, vocab_size, log, progress), cache_dir, "written")


def open_datasets(
    blends: Blends, config: TrainerConfig, cache_dir: Path, vocab_size: int, is_needed: bool
) -> dict[str, torch.utils.data.Dataset | None]:
    """Map the index files of the blends. `is_needed` is false on ranks of middle pipeline stages: they read no samples
    and get None for each split."""
    if not is_needed:
        return dict.fromkeys(blends)
    datasets = {}
    for split, of_split in blends.items():
        config_here = config_of_split(config, split)
        at = functools.partial(_dataset_config, config_here, vocab_size, cache_dir)
        datasets[split] = _open_all(kind_of(config_here.data), of_split, at)
    return datasets


def build_index(
    config: TrainerConfig,
    cache_dir: Path,
    vocab_size: int,
    log: LogLine,
    progress: Progress | None = None,
) -> Blends:
    """Check every index file that the run needs in `cache_dir`, and build missing ones. Returns the blends by split.

    Only one process calls this.

    Raises:
        ConfigError: see `plan_blends`.
        OSError: the index files cannot be written.
    """
    blends = plan_blends(config, vocab_size, log, progress)
    complete_indices(itertools.chain(*blends.values()), config, cache_dir, vocab_size, log)
    return blends


def complete_indices(
    blends: Iterable[Blend], config: TrainerConfig, cache_dir: Path, vocab_size: int, log: LogLine
) -> None:
    """Check every index file of the blends in `cache_dir`, and build missing ones.

    Parts are built before blends, since building a blend reads its parts.
    """
    orders, mixed = list[Index](), list[Index]()
    for blend in blends:
        of_split = config_of_split(config, blend.split)
        kind, at = kind_of(of_split.data), functools.partial(_dataset_config, of_split, vocab_size)
        orders += [
            _order_index(kind, blend.split, part, order, at, cache_dir)
            for part in blend.parts
            for order in part.stream.orders
        ]
        mixed += [_blend_index(kind, blend, at, cache_dir)] if len(blend.parts) > 1 else []
    complete([*orders, *mixed], cache_dir, log)


def _order_index(
    kind: Kind, split: str, part: Part, order: Order, at: Callable[..., GPTDatasetConfig], cache_dir: Path
) -> Index:
    def build(directory: Path) -> None:
        documents = numpy.arange(part.documents.first, part.documents.end, dtype=numpy.int32)
        _order_dataset(kind, split, part, order, functools.partial(at, directory), documents)

    unread = functools.partial(at, cache_dir, defer_npy_index_mmap=True)
    named = _order_dataset(kind, split, part, order, unread)
    return Index(
        title=f"{split} of {part.prefix or 'mock samples'}",
        key=f"{named.unique_description_hash}-{type(named).__name__}-{_core_split(split).name}",
        suffixes=PART_FILES,
        source=None if part.prefix is None else Path(f"{part.prefix}.idx"),
        build=build,
    )


def _blend_index(kind: Kind, blend: Blend, at: Callable[..., GPTDatasetConfig], cache_dir: Path) -> Index:
    def build(directory: Path) -> None:
        parts = _part_datasets(kind, blend, functools.partial(at, cache_dir))
        _blended_dataset(blend, parts, at(directory))

    unread = functools.partial(at, cache_dir, defer_npy_index_mmap=True)
    named = _blended_dataset(blend, _part_datasets(kind, blend, unread), unread())
    return Index(
        title=f"the blend of {blend.split}",
        key=f"{named.unique_description_hash}-{type(named).__name__}-{_core_split(blend.split).name}",
        suffixes=BLEND_FILES,
        source=None,
        build=build,
    )


def _open_all(
    kind: Kind, blends: Sequence[Blend], at: Callable[..., GPTDatasetConfig]
) -> torch.utils.data.Dataset:
    datasets = [_open(kind, blend, at) for blend in blends]
    return datasets[0] if len(datasets) == 1 else Consecutive(datasets, [blend.end for blend in blends])


def _open(kind: Kind, blend: Blend, at: Callable[..., GPTDatasetConfig]) -> torch.utils.data.Dataset:
    parts = _part_datasets(kind, blend, at)
    dataset = parts[0] if len(parts) == 1 else _blended_dataset(blend, parts, at())
    return Numbered(dataset, blend.first) if blend.first else dataset


def _part_datasets(
    kind: Kind, blend: Blend, at: Callable[..., GPTDatasetConfig]
) -> list[GPTDataset] | list[Continuation]:
    """Datasets of the parts, all of one class. They are Core's own if each reads one order from its beginning."""
    orders = [
        [_order_dataset(kind, blend.split, part, order, at) for order in part.stream.orders]
        for part in blend.parts
    ]
    if all(part.start == 0 and len(part.stream.orders) == 1 for part in blend.parts):
        return [first for (first,) in orders]
    return [
        Continuation(datasets, part.stream, part.start)
        for datasets, part in zip(orders, blend.parts, strict=True)
    ]


def _order_dataset(
    kind: Kind,
    split: str,
    part: Part,
    order: Order,
    at: Callable[..., GPTDatasetConfig],
    documents: numpy.ndarray | None = None,
) -> GPTDataset:
    """Core's dataset for one order of a corpus. Core reads `documents` only to build the index."""
    dataset_config = at(seed=order.seed)
    corpus = kind.dataset.build_low_level_dataset(part.prefix, dataset_config)
    return kind.dataset(corpus, part.prefix, documents, order.num_samples, _core_split(split), dataset_config)


def _core_split(split: str) -> Split:
    """Core's name of a split. A named validation set is valid."""
    return Split[split.partition("/")[0]]


def _blended_dataset(
    blend: Blend, parts: Sequence[torch.utils.data.Dataset], dataset_config: GPTDatasetConfig
) -> BlendedDataset:
    weights = [part.weight for part in blend.parts]
    return BlendedDataset(parts, weights, blend.num_samples, dataset_config)


def _dataset_config(
    config: TrainerConfig,
    vocab_size: int,
    directory: Path,
    *,
    seed: int | None = None,
    defer_npy_index_mmap: bool = False,
) -> GPTDatasetConfig:
    """Configuration of a dataset. `seed` shuffles its samples; a blend has none."""
    return GPTDatasetConfig(
        random_seed=config.training.seed if seed is None else seed,
        sequence_length=config.model.seq_length,
        path_to_cache=str(directory),
        tokenizer=Vocabulary(vocab_size, config.data.eod_id),
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
