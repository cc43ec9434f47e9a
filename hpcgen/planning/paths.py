"""Where a run reads and writes: every path of a run file made absolute."""

from __future__ import annotations

import dataclasses
import os.path
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcgen.config.fields import PATH
from hpcgen.config.run import RunConfig
from hpcgen.errors import HpcgenError, Problem
from trainer.config import BlendConfig, Dataset

BLENDS = ("datasets", "train", "valid", "test")


def absolute_paths(config: RunConfig, directory: Path) -> RunConfig:
    """`config` with every relative path taken from `directory`, the folder of the run file.

    Raises:
        HpcgenError: the folder's name would change where sbatch writes the log of the run.
    """

    def here(path: str) -> str:
        return os.path.normpath(directory / path)

    def maybe(path: str | None) -> str | None:
        return None if path is None else here(path)

    def blend(datasets: tuple[Dataset, ...]) -> tuple[Dataset, ...]:
        return tuple(dataclasses.replace(dataset, prefix=here(dataset.prefix)) for dataset in datasets)

    run_dir = here(config.paths.run_dir)
    if "%" in run_dir:
        raise HpcgenError(
            f"{run_dir}: sbatch reads % in the path of its log as a pattern",
            "move the run file, or give paths.run_dir as an absolute path",
        )
    data = config.data
    tokenize = data.tokenize and dataclasses.replace(
        data.tokenize,
        input=tuple(here(path) for path in data.tokenize.input),
        output_prefix=here(data.tokenize.output_prefix),
    )
    tokenizer = dataclasses.replace(
        data.tokenizer,
        vocab_file=maybe(data.tokenizer.vocab_file),
        merges_file=maybe(data.tokenizer.merges_file),
        tokenizer_file=maybe(data.tokenizer.tokenizer_file),
    )
    blends: dict[str, Any] = {name: blend(getattr(data, name)) for name in BLENDS}
    checkpoint = dataclasses.replace(
        config.checkpoint, save=maybe(config.checkpoint.save), load=maybe(config.checkpoint.load)
    )
    return dataclasses.replace(
        config,
        paths=dataclasses.replace(config.paths, run_dir=run_dir),
        data=dataclasses.replace(
            data, tokenize=tokenize, tokenizer=tokenizer, cache_dir=maybe(data.cache_dir), **blends
        ),
        checkpoint=checkpoint,
    )


def trainer_data(config: RunConfig) -> BlendConfig:
    """The blend that the trainer reads: the one that is given, else what the tokenizing stage makes."""
    data = config.data
    datasets = data.datasets
    if not (datasets or data.train or data.mock) and data.tokenize is not None:
        datasets = (Dataset(prefix=data.tokenize.output_prefix),)
    fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(BlendConfig)}
    return BlendConfig(**{**fields, "datasets": datasets})


def plain_path_problems(config: RunConfig) -> Iterator[Problem]:
    """A run directory that is no directory of its own, and wrong paths of the trainer's sections.

    The types of these carry no pattern.
    """
    if os.path.normpath(config.paths.run_dir) in ("/", "//"):
        yield Problem("paths.run_dir", "is the whole file system", "name a directory of its own")
    for path, value in _trainer_paths(config):
        if not value:
            yield Problem(path, "is empty", "name a path, or leave the key out")
        elif reason := PATH.reason(value):
            yield Problem(path, reason)


def _trainer_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    for name in BLENDS:
        for index, dataset in enumerate(getattr(config.data, name)):
            yield f"data.{name}[{index}].prefix", dataset.prefix
    for path, value in (
        ("data.cache_dir", config.data.cache_dir),
        ("data.tokenizer.vocab_file", config.data.tokenizer.vocab_file),
        ("data.tokenizer.merges_file", config.data.tokenizer.merges_file),
        ("data.tokenizer.tokenizer_file", config.data.tokenizer.tokenizer_file),
        ("checkpoint.save", config.checkpoint.save),
        ("checkpoint.load", config.checkpoint.load),
    ):
        if value is not None:
            yield path, value
