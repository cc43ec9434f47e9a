"""Megatron's GPT datasets for training, validation and test, from the three ways of naming data."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

from trainer.config import ConfigError, Dataset, TrainerConfig

SPLITS = ("train", "valid", "test")

LOOKED_AT = 2**20
"""Tokens of each corpus that are compared with the size of the vocabulary."""

Blend = tuple[list[str], list[float] | None]
"""Prefixes and their weights, as Megatron takes them."""


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
    config: TrainerConfig, cache_dir: Path, vocab_size: int, is_needed: bool
) -> dict[str, torch.utils.data.Dataset | None]:
    """Builds the sample indices (rank 0 first, the others read its files) and opens the data.

    Returns the splits that have data, by name. `is_needed` is false on ranks of middle pipeline stages: they
    read no samples, take part in the build, and get None for each split.

    Raises:
        ConfigError: the data is not named in exactly one way, a file is missing, or a split got no document.
    """
    dataset_config = GPTDatasetConfig(
        random_seed=config.training.seed,
        sequence_length=config.model.seq_length,
        path_to_cache=str(cache_dir),
        tokenizer=Vocabulary(vocab_size),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **_sources(config, vocab_size),
    )
    sizes = _sizes(config)
    used = _used_splits(config, dataset_config, sizes)
    for index, split in enumerate(SPLITS):
        if split not in used:
            _drop_split(dataset_config, index)
    builder = BlendedMegatronDatasetBuilder(
        MockGPTDataset if dataset_config.mock else GPTDataset, sizes, lambda: is_needed, dataset_config
    )
    built = dict(zip(SPLITS, builder.build(), strict=True))
    return {split: dataset for split, dataset in built.items() if split in used}


def _sizes(config: TrainerConfig) -> list[int]:
    """Samples of train, valid, test. Every evaluation reads the same samples, so that its losses compare."""
    training = config.training
    evaluation = training.eval_iters * training.global_batch_size
    return [training.train_iters * training.global_batch_size, evaluation, evaluation]


def _sources(config: TrainerConfig, rows: int) -> dict[str, object]:
    data = config.data
    ways = [bool(data.datasets), bool(data.train), data.mock]
    if sum(ways) != 1 or (not data.train and (data.valid or data.test)):
        raise ConfigError(
            "data: exactly one of data.datasets, data.train (with data.valid and data.test) and "
            f"data.mock = true must be given; got datasets: {len(data.datasets)}, train: {len(data.train)}, "
            f"valid: {len(data.valid)}, test: {len(data.test)}, mock: {data.mock}"
        )
    if data.mock:
        return {}
    if data.datasets:
        return {"blend": _blend(data.datasets, "data.datasets", rows), "split": data.split}
    parts = {"train": data.train, "valid": data.valid, "test": data.test}
    return {
        "blend_per_split": [
            _blend(part, f"data.{name}", rows) if part else None for name, part in parts.items()
        ]
    }


def _blend(datasets: Sequence[Dataset], where: str, rows: int) -> Blend:
    prefixes = [dataset.prefix for dataset in datasets]
    for prefix in prefixes:
        for extension in (".bin", ".idx"):
            if not Path(prefix + extension).is_file():
                raise ConfigError(f"{where}: {prefix}{extension} is not a file (prefix = {prefix!r})")
        if not Path(prefix + ".bin").stat().st_size:  # Core would count its epochs for ever
            raise ConfigError(f"{where}: {prefix}.bin holds no token")
        _require_rows(where, prefix, rows)
    weights = [dataset.weight for dataset in datasets if dataset.weight is not None]
    if weights and len(weights) != len(datasets):
        raise ConfigError(
            f"{where}: {len(weights)} of {len(datasets)} datasets have a weight; give all or none"
        )
    if len(datasets) == 1:
        return prefixes, None  # Core then reads the corpus itself, with no index of a blend
    return prefixes, weights or [float(_tokens(prefix)) for prefix in prefixes]


def _require_rows(where: str, prefix: str, rows: int) -> None:
    """Refuses a corpus of another tokenizer. A look at its beginning finds one: Core would embed such ids as zeros."""
    corpus = IndexedDataset(prefix)
    beginning = numpy.fromfile(f"{prefix}.bin", dtype=corpus.index.dtype, count=LOOKED_AT)
    if (largest := int(beginning.max())) >= rows:
        raise ConfigError(
            f"{where}: {prefix} holds the token id {largest}, and the embedding has {rows} rows; "
            "name the tokenizer that made it (data.tokenizer), or mend model.vocab_size"
        )


def _tokens(prefix: str) -> int:
    corpus = IndexedDataset(prefix)  # its arrays are views of a file that it unmaps when it goes
    return int(corpus.sequence_lengths.sum())


def _used_splits(config: TrainerConfig, dataset_config: GPTDatasetConfig, sizes: Sequence[int]) -> set[str]:
    """The splits to build. An empty one would keep Core counting epochs for ever.

    Test data is optional everywhere; training data, and validation data of a single blend, must be there.
    """
    used = {split for split, size in zip(SPLITS, sizes, strict=True) if size > 0}
    if dataset_config.mock:
        return used
    if dataset_config.blend is None:
        return {s for s in used if dataset_config.blend_per_split[SPLITS.index(s)] is not None}
    for split in sorted(used):
        empty = [p for p in dataset_config.blend[0] if not _documents(p, split, dataset_config)]
        if not empty:
            continue
        if split == "test":
            used.discard(split)
            continue
        raise ConfigError(
            f"data.split = {config.data.split!r} leaves no document of {empty[0]} for {split}; give {split} "
            "a larger share" + (", or set training.eval_iters = 0" if split == "valid" else "")
        )
    return used


def _documents(prefix: str, split: str, dataset_config: GPTDatasetConfig) -> int:
    """Documents of the corpus in the split, counted as Core cuts them."""
    bounds = dataset_config.split_matrix[SPLITS.index(split)]
    if bounds is None:
        return 0
    total = len(IndexedDataset(prefix))
    return round(bounds[1] * total) - round(bounds[0] * total)


def _drop_split(dataset_config: GPTDatasetConfig, index: int) -> None:
    if dataset_config.blend_per_split is not None:
        dataset_config.blend_per_split[index] = None
    else:
        dataset_config.split_matrix[index] = None
