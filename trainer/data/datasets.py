"""Megatron-Core's GPT datasets for training, validation and test, opened from index files that rank 0 vouches for.

Core's own builder is not used: it makes all ranks wait in barriers that they do not leave when rank 0 fails, writes
its files in place, and gives each split of a blend the same corpora. Its dataset classes are, so the samples and the
names of the index files are Core's.
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
from trainer.data.blend import SPLITS, Blend, Part, Say, plan_blends, reordered
from trainer.data.index_files import Index, complete
from trainer.faults.storage import at_rank_0

PART_FILES = ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")
"""What the names of a GPTDataset's index files end with (the same in megatron-core 0.16.1 to 0.19)."""

BLEND_FILES = ("description.txt", "dataset_index.npy", "dataset_sample_index.npy")
"""And those of a BlendedDataset."""

say_on_stdout: Say = functools.partial(print, flush=True)


@dataclass(frozen=True)
class Vocabulary:
    """What Megatron's datasets ask of a tokenizer, for data that is tokenized already."""

    vocab_size: int

    # No token is padding: samples are cut from a stream of whole documents.
    pad = -1

    @property
    def eod(self) -> int:
        """The end of document; only made-up samples read it."""
        return self.vocab_size - 1

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """Names this tokenizer in the key of the index cache."""
        return OrderedDict({"class": "Vocabulary"})


def build_datasets(
    config: TrainerConfig,
    cache_dir: Path,
    vocab_size: int,
    is_needed: bool,
    say: Say = say_on_stdout,
    earlier: TrainingConfig | None = None,
) -> dict[str, torch.utils.data.Dataset | None]:
    """The splits that have data, by name. Every rank calls this.

    Rank 0 looks at the data, checks the index files and builds what is missing; then each rank maps them. `is_needed`
    is false on ranks of middle pipeline stages: they read no samples and get None for each split. `say` is called
    on rank 0, also when the samples come in another order than in the life before, which read `earlier`.

    Raises:
        ConfigError: see `plan_blends`.
        TrainerError: the index files cannot be written.
    """

    def build() -> dict[str, Blend]:
        blends = build_index(config, cache_dir, vocab_size, say)
        if earlier is not None:
            _say_new_order(blends["train"], total_samples(earlier), config.model.seq_length, say)
        return blends

    blends = at_rank_0(build, cache_dir, "written")
    if not is_needed:
        return dict.fromkeys(blends)
    dataset_config = _dataset_config(config, vocab_size, cache_dir)
    return {split: _open(blend, dataset_config) for split, blend in blends.items()}


def build_index(config: TrainerConfig, cache_dir: Path, vocab_size: int, say: Say) -> dict[str, Blend]:
    """Leaves every index file that the run needs in `cache_dir`, checked; returns the blend of each split.

    One process calls this. The parts come before the blends, which are built by reading them.

    Raises:
        ConfigError: see `plan_blends`.
        OSError: the index files cannot be written.
    """
    blends = plan_blends(config, vocab_size, say)
    at = functools.partial(_dataset_config, config, vocab_size)
    parts = [(blend.split, part) for blend in blends.values() for part in blend.parts]
    indices = [_part_index(split, part, at, cache_dir) for split, part in parts]
    indices += [_blend_index(blend, at, cache_dir) for blend in blends.values() if len(blend.parts) > 1]
    complete(indices, cache_dir, say)
    return blends


def _say_new_order(blend: Blend, earlier: int, seq_length: int, say: Say) -> None:
    if parts := reordered(blend, earlier, seq_length):
        others = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        say(
            f"data: warning: ANOTHER ORDER: {blend.num_samples:,} samples are asked for, and the life before asked for "
            f"{earlier:,}: Megatron-Core shuffles {parts[0].prefix}{others} anew: part "
            "of what was read comes again in the same epoch, and as much is never read. The order stays where "
            "train_iters and the batch sizes go as many times through the data"
        )


def _part_index(split: str, part: Part, at: Callable[..., GPTDatasetConfig], cache_dir: Path) -> Index:
    def build(directory: Path) -> None:
        documents = numpy.arange(part.documents.first, part.documents.end, dtype=numpy.int32)
        _part_dataset(split, part, at(directory), documents)

    named = _part_dataset(split, part, at(cache_dir, defer_npy_index_mmap=True))  # reads nothing yet
    return Index(
        title=f"{split} of {part.prefix or 'made-up samples'}",
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
    """Core's dataset of one corpus. It reads `documents` only to build the index."""
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
        tokenizer=Vocabulary(vocab_size),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        defer_npy_index_mmap=defer_npy_index_mmap,
        **_sources(config.data),
    )


def _sources(data: BlendConfig) -> dict[str, object]:
    """How the data is named, which is part of the key: weights and sizes go to each dataset."""

    def prefixes(datasets: Sequence[Dataset]) -> tuple[list[str], None] | None:
        return ([dataset.prefix for dataset in datasets], None) if datasets else None

    if data.mock:
        return {}
    if data.datasets:
        return {"blend": prefixes(data.datasets), "split": data.split}
    return {"blend_per_split": [prefixes(getattr(data, split)) for split in SPLITS]}
