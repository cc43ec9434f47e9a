"""The datasets for training, validation and test, opened from index files that rank 0 has checked.

Their kind (`trainer.data.kinds`) makes the samples of a pair, and Core's class blends pairs. This does not use Core's
builder, whose ranks wait in barriers forever if rank 0 fails, which writes its files in place, and which uses the
same corpora for every split of a blend.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

from trainer.contract.config import TrainerConfig
from trainer.contract.resuming.sampling import Sampling, Stream
from trainer.contract.validation import config_of_split
from trainer.data.blend import Blend, Blends, plan_blends
from trainer.data.gpt import dataset_config
from trainer.data.index_files import Index, LogLine, complete
from trainer.data.kind import Source, core_split
from trainer.data.kinds import kind_of
from trainer.data.progress import Progress
from trainer.data.replay import counts
from trainer.faults.storage import at_rank_0

BLEND_FILES = ("description.txt", "dataset_index.npy", "dataset_sample_index.npy")
"""Suffixes of the index files of a BlendedDataset."""

log_to_stdout: LogLine = functools.partial(print, flush=True)


class Continuation(torch.utils.data.Dataset):
    """The samples of a stream from `start` on, as a dataset for Core's blends."""

    def __init__(self, orders: Sequence[torch.utils.data.Dataset], stream: Stream, start: int) -> None:
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

    def locate(self, sample: int) -> tuple[torch.utils.data.Dataset, int]:
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


def located(dataset: torch.utils.data.Dataset, sample: int) -> tuple[torch.utils.data.Dataset, int]:
    """The dataset of an order that a sample of a training set comes from, and the sample's number in it."""
    while isinstance(dataset, (Consecutive, Numbered, BlendedDataset, Continuation)):
        if isinstance(dataset, Consecutive):
            dataset = dataset.reading(sample)
        elif isinstance(dataset, Numbered):
            dataset, sample = dataset.dataset, sample - dataset.first
        elif isinstance(dataset, BlendedDataset):
            part = dataset.datasets[dataset.dataset_index[sample]]
            dataset, sample = part, int(dataset.dataset_sample_index[sample])
        else:
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

    def record(self, consumed: int) -> dict[str, Any]:
        """Sections of the record of a checkpoint after `consumed` samples."""
        sampling = self.at(consumed)
        return {"sampling": sampling and sampling.to_dict()}

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
    return {
        split: _open_all(of_split, Source(config_of_split(config, split), cache_dir, vocab_size))
        for split, of_split in blends.items()
    }


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
    blends = plan_blends(config, cache_dir, vocab_size, log, progress)
    complete_indices(itertools.chain(*blends.values()), config, cache_dir, vocab_size, log)
    return blends


def complete_indices(
    blends: Iterable[Blend], config: TrainerConfig, cache_dir: Path, vocab_size: int, log: LogLine
) -> None:
    """Check every index file of the blends in `cache_dir`, and build missing ones.

    Parts are built before blends, since building a blend reads its parts.
    """
    orders, mixed = list[Index | None](), list[Index]()
    for blend in blends:
        source = Source(config_of_split(config, blend.split), cache_dir, vocab_size)
        kind = kind_of(source.config.data)
        orders += [
            kind.index(blend.split, part.stream, order, source)
            for part in blend.parts
            for order in part.stream.orders
        ]
        mixed += [_blend_index(blend, source)] if len(blend.parts) > 1 else []
    if indices := [*filter(None, orders), *mixed]:
        complete(indices, cache_dir, log)


def _blend_index(blend: Blend, source: Source) -> Index:
    def build(directory: Path) -> None:
        parts = _part_datasets(blend, source)
        _blended_dataset(blend, parts, dataset_config(source, directory))

    unread = dataset_config(source, source.cache_dir, defer_npy_index_mmap=True)
    named = _blended_dataset(blend, _part_datasets(blend, source, unread=True), unread)
    return Index(
        title=f"the blend of {blend.split}",
        key=f"{named.unique_description_hash}-{type(named).__name__}-{core_split(blend.split).name}",
        suffixes=BLEND_FILES,
        source=None,
        build=build,
    )


def _open_all(blends: Sequence[Blend], source: Source) -> torch.utils.data.Dataset:
    datasets = [_open(blend, source) for blend in blends]
    return datasets[0] if len(datasets) == 1 else Consecutive(datasets, [blend.end for blend in blends])


def _open(blend: Blend, source: Source) -> torch.utils.data.Dataset:
    parts = _part_datasets(blend, source)
    dataset = parts[0]
    if len(parts) > 1:
        dataset = _blended_dataset(blend, parts, dataset_config(source, source.cache_dir))
    return Numbered(dataset, blend.first) if blend.first else dataset


def _part_datasets(
    blend: Blend, source: Source, *, unread: bool = False
) -> Sequence[torch.utils.data.Dataset]:
    """Datasets of the parts, all of one class: that of their kind if each reads one order from its beginning."""
    kind = kind_of(source.config.data)
    orders = [
        [kind.dataset(blend.split, part.stream, order, source, unread=unread) for order in part.stream.orders]
        for part in blend.parts
    ]
    if all(part.start == 0 and len(part.stream.orders) == 1 for part in blend.parts):
        return [first for (first,) in orders]
    return [
        Continuation(datasets, part.stream, part.start)
        for datasets, part in zip(orders, blend.parts, strict=True)
    ]


def _blended_dataset(
    blend: Blend, parts: Sequence[torch.utils.data.Dataset], core: GPTDatasetConfig
) -> BlendedDataset:
    weights = [part.weight for part in blend.parts]
    return BlendedDataset(parts, weights, blend.num_samples, core)
