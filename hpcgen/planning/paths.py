"""The paths of a run: relative paths become absolute, and invalid ones are reported."""

from __future__ import annotations

import dataclasses
import os.path
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcgen.config.corpus import CorpusConfig, CorpusJob, SourceConfig, blend, selection
from hpcgen.config.fields import PATH
from hpcgen.config.run import RunConfig
from hpcgen.errors import HpcgenError, Problem
from trainer.contract import imports
from trainer.contract.config import BlendConfig, Dataset

BLENDS = ("datasets", "train", "valid", "test")


def absolute_paths(config: RunConfig, directory: Path) -> RunConfig:
    """`config` with every relative path resolved against `directory`, the directory of the run file.

    Raises:
        HpcgenError: the path of the run directory contains %, which sbatch would expand in the name of the log.
    """

    def here(path: str) -> str:
        return os.path.normpath(directory / path)

    def maybe(path: str | None) -> str | None:
        return None if path is None else here(path)

    def absolute(datasets: tuple[Dataset, ...]) -> tuple[Dataset, ...]:
        return tuple(dataclasses.replace(dataset, prefix=here(dataset.prefix)) for dataset in datasets)

    run_dir = here(config.paths.run_dir)
    if "%" in run_dir:
        raise HpcgenError(
            f"{run_dir}: the path contains %, which sbatch would expand in the name of the log",
            "move the run file, or set paths.run_dir to an absolute path",
        )
    data = config.data
    corpus = data.corpus and dataclasses.replace(
        data.corpus,
        directory=here(data.corpus.directory),
        source=dataclasses.replace(
            data.corpus.source,
            directory=maybe(data.corpus.source.directory),
            manifest=maybe(data.corpus.source.manifest),
        ),
    )
    tokenizer = dataclasses.replace(
        data.tokenizer,
        vocab_file=maybe(data.tokenizer.vocab_file),
        merges_file=maybe(data.tokenizer.merges_file),
        tokenizer_file=maybe(data.tokenizer.tokenizer_file),
    )

    def function(path: str | None) -> str | None:
        file = imports.file_of(path) if path else None
        return path if path is None or file is None else imports.with_file(path, here(file))

    blends: dict[str, Any] = {name: absolute(getattr(data, name)) for name in BLENDS}
    checkpoint = dataclasses.replace(
        config.checkpoint, save=maybe(config.checkpoint.save), load=maybe(config.checkpoint.load)
    )
    return dataclasses.replace(
        config,
        paths=dataclasses.replace(config.paths, run_dir=run_dir),
        data=dataclasses.replace(
            data, corpus=corpus, tokenizer=tokenizer, cache_dir=maybe(data.cache_dir), **blends
        ),
        checkpoint=checkpoint,
        model=dataclasses.replace(
            config.model,
            layer_spec=function(config.model.layer_spec),
            model_provider=function(config.model.model_provider),
        ),
        optimizer=dataclasses.replace(config.optimizer, lr_schedule=function(config.optimizer.lr_schedule)),
    )


def import_files(config: RunConfig) -> tuple[str, ...]:
    """The files that contain custom functions of the trainer."""
    paths = (config.model.layer_spec, config.model.model_provider, config.optimizer.lr_schedule)
    files = (imports.file_of(path) for path in paths if path is not None)
    return tuple(dict.fromkeys(file for file in files if file is not None))


def trainer_data(config: RunConfig) -> BlendConfig:
    """The blend that the trainer reads: the one in the run file, or else the pairs of the corpus."""
    data = config.data
    fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(BlendConfig)}
    if not (data.datasets or data.train or data.mock) and data.corpus is not None:
        fields |= blend(data.corpus)
    return BlendConfig(**fields)


def plain_path_problems(config: RunConfig) -> Iterator[Problem]:
    """Yields problems of the run directory and of paths in the trainer's sections, whose types have no pattern."""
    if os.path.normpath(config.paths.run_dir) in ("/", "//"):
        yield Problem("paths.run_dir", "is the root directory", "use a directory for this run only")
    for path, value in _trainer_paths(config):
        if not value:
            yield Problem(path, "is empty", "set a path, or remove the key")
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
    for path, value in (
        ("model.layer_spec", config.model.layer_spec),
        ("model.model_provider", config.model.model_provider),
        ("optimizer.lr_schedule", config.optimizer.lr_schedule),
    ):
        if value is not None and (file := imports.file_of(value)) is not None:
            yield path, file


def corpus_job(config: RunConfig) -> CorpusJob:
    """The input of a run's data stages. The paths of `config` are absolute.

    It is written into scripts and job directories, so it omits the URLs of the source, which may contain signatures.
    The manifest contains them.

    Raises:
        HpcgenError: the run has no corpus.
    """
    job = planning_job(config)
    source = SourceConfig(token_variable=job.corpus.source.token_variable)
    return dataclasses.replace(job, corpus=dataclasses.replace(job.corpus, source=source))


def planning_job(config: RunConfig) -> CorpusJob:
    """The corpus with its source, for `hpcgen data plan`. It must not be written to a file.

    Raises:
        HpcgenError: the run has no corpus.
    """
    corpus = config.data.corpus
    if corpus is None:
        raise HpcgenError("data.corpus is missing", "set at least its directory, source and num_output_files")
    return CorpusJob(
        corpus=corpus, tokenizer=config.data.tokenizer, share=config.share, selection=selection(corpus)
    )


def manifest_of(corpus: CorpusConfig) -> str:
    """Path of the manifest, the list of the corpus's files that `hpcgen data plan` writes."""
    return f"{corpus.directory}/manifest.jsonl"
