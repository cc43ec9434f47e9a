"""Megatron-Core's GPT datasets for training, validation and test, opened from index files that rank 0 has checked.

This uses Core's dataset classes, so the samples and the names of the index files are Core's. It does not use Core's
builder, whose ranks wait in barriers forever if rank 0 fails, which writes its files in place, and which uses the
same corpora for every split of a blend.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import Split

from trainer.contract.batch_size import total_samples
from trainer.contract.config import BlendConfig, Dataset, TrainerConfig, TrainingConfig
from trainer.data.blend import SPLITS, Blend, LogLine, Part, plan_blends, reordered
from trainer.data.index_files import Index, complete
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


def build_datasets(
    config: TrainerConfig,
    cache_dir: Path,
    vocab_size: int,
    is_needed: bool,
    log: LogLine = log_to_stdout,
    earlier: TrainingConfig | None = None,
) -> dict[str, torch.utils.data.Dataset | None]:
    """Datasets of the splits that have data, by name. Every rank must call this.

    Rank 0 examines the data, checks the index files and builds missing ones. Then each rank maps them. `is_needed` is
    false on ranks of middle pipeline stages: they read no samples and get None for each split. `log` logs on rank 0.
    It also warns if the samples have a different order than in the previous attempt, whose plan was `earlier`.

    Raises:
        ConfigError: see `plan_blends`.
        TrainerError: the index files cannot be written.
    """

    def build() -> dict[str, Blend]:
        blends = build_index(config, cache_dir, vocab_size, log)
        if earlier is not None:
            _warn_new_order(blends["train"], total_samples(earlier), config.model.seq_length, log)
        return blends

    blends = at_rank_0(build, cache_dir, "written")
    if not is_needed:
        return dict.fromkeys(blends)
    dataset_config = _dataset_config(config, vocab_size, cache_dir)
    return {split: _open(blend, dataset_config) for split, blend in blends.items()}


def build_index(config: TrainerConfig, cache_dir: Path, vocab_size: int, log: LogLine) -> dict[str, Blend]:
    """Check every index file that the run needs in `cache_dir`, and build missing ones. Returns the blends by split.

    Only one process calls this. Parts are built before blends, since building a blend reads its parts.

    Raises:
        ConfigError: see `plan_blends`.
        OSError: the index files cannot be written.
    """
    blends = plan_blends(config, vocab_size, log)
    at = functools.partial(_dataset_config, config, vocab_size)
    parts = [(blend.split, part) for blend in blends.values() for part in blend.parts]
    indices = [_part_index(split, part, at, cache_dir) for split, part in parts]
    indices += [_blend_index(blend, at, cache_dir) for blend in blends.values() if len(blend.parts) > 1]
    complete(indices, cache_dir, log)
    return blends


def _warn_new_order(blend: Blend, earlier: int, seq_length: int, log: LogLine) -> None:
    if parts := reordered(blend, earlier, seq_length):
        others = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        log(
            f"data: warning: NEW SAMPLE ORDER: this attempt plans {blend.num_samples:,} samples, the previous one "
            f"{earlier:,}, so Megatron-Core reshuffles {parts[0].prefix}{others}. Some samples of the current epoch "
            "are read twice, and as many are never read. The order stays the same if train_iters and the batch sizes "
            "result in the same number of epochs"
        )


def _part_index(split: str, part: Part, at: Callable[..., GPTDatasetConfig], cache_dir: Path) -> Index:
    def build(directory: Path) -> None:
        documents = numpy.arange(part.documents.first, part.documents.end, dtype=numpy.int32)
        _part_dataset(split, part, at(directory), documents)

    named = _part_dataset(split, part, at(cache_dir, defer_npy_index_mmap=True))  # reads nothing yet
    return Index(
        title=f"{split} of {part.prefix or 'mock samples'}",
        key=f"{named.unique_description_hash}-{type(named).__name__}-{split}",
        suffixes=PART_FILES,
        source=None if part.prefix is None else Path(f"{part.prefix}.idx"),
        build=build,
    )


def _blend_index(blend: Blend, at: Callable[..., GPTDatasetConfig], cache_dir: Path) -> Index:
    def build(directory: Path) -> None:
        _blended_dataset(blend, _part_datasets(blend, at(cache_dir)), at(directory))

    unread = at(cache_dir, defer_npy_index_mmap=True)
    named = _blended_dataset(blend, _part_datasets(blend, unread), unread)
    return Index(
        title=f"the blend of {blend.split}",
        key=f"{named.unique_description_hash}-{type(named).__name__}-{blend.split}",
        suffixes=BLEND_FILES,
        source=None,
        build=build,
    )


def _open(blend: Blend, dataset_config: GPTDatasetConfig) -> torch.utils.data.Dataset:
    parts = _part_datasets(blend, dataset_config)
    return parts[0] if len(parts) == 1 else _blended_dataset(blend, parts, dataset_config)


def _part_datasets(blend: Blend, dataset_config: GPTDatasetConfig) -> list[GPTDataset]:
    return [_part_dataset(blend.split, part, dataset_config) for part in blend.parts]


def _part_dataset(
    split: str, part: Part, dataset_config: GPTDatasetConfig, documents: numpy.ndarray | None = None
) -> GPTDataset:
    """Core's dataset for one corpus. Core reads `documents` only to build the index."""
    kind = MockGPTDataset if dataset_config.mock else GPTDataset
    corpus = kind.build_low_level_dataset(part.prefix, dataset_config)
    return kind(corpus, part.prefix, documents, part.num_samples, Split[split], dataset_config)


def _blended_dataset(
    blend: Blend, parts: list[GPTDataset], dataset_config: GPTDatasetConfig
) -> BlendedDataset:
    weights = [part.weight for part in blend.parts]
    return BlendedDataset(parts, weights, blend.num_samples, dataset_config)


def _dataset_config(
    config: TrainerConfig, vocab_size: int, directory: Path, defer_npy_index_mmap: bool = False
) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        random_seed=config.training.seed,
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
