"""The paths of a run: relative paths become absolute, and invalid ones are reported."""

from __future__ import annotations

import dataclasses
import glob
import os.path
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpcgen.config.corpus import CorpusConfig, CorpusJob, SourceConfig, blend, selection
from hpcgen.config.fields import PATH
from hpcgen.config.program import ProgramConfig, in_run_dir
from hpcgen.config.run import DataConfig, RunConfig
from hpcgen.errors import HpcgenError, Problem
from hpcgen.text import nearest
from trainer.contract.code import imports
from trainer.contract.config import BlendConfig
from trainer.contract.evaluation import EvaluationSettings, is_task_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BLENDS = ("datasets", "train", "valid", "test")
Section = TypeVar("Section", bound="DataclassInstance")


def absolute_paths(config: RunConfig, directory: Path) -> RunConfig:
    """`config` with every relative path resolved against `directory`, the directory of the run file.

    Raises:
        HpcgenError: the path of the run directory contains %, which sbatch would expand in the name of the log.
    """
    at = _Resolver(directory)
    run_dir = at.path(config.paths.run_dir)
    if "%" in run_dir:
        raise HpcgenError(
            f"{run_dir}: the path contains %, which sbatch would expand in the name of the log",
            "move the run file, or set paths.run_dir to an absolute path",
        )
    return dataclasses.replace(
        config,
        paths=dataclasses.replace(config.paths, run_dir=run_dir),
        data=at.data(config.data),
        checkpoint=at.fields(config.checkpoint, "save", "load"),
        model=at.functions(config.model, "layer_spec", "model_provider"),
        optimizer=at.functions(config.optimizer, "lr_schedule"),
        program=config.program and at.program(config.program, run_dir),
        evaluation=at.evaluation(config.evaluation),
        generation=at.fields(config.generation, "prompts", "output"),
        export=at.fields(config.export, "directory"),
    )


class _Resolver:
    """Resolves relative paths in sections of a run file. Null stays null."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, path: str) -> str:
        """The absolute path."""
        return os.path.normpath(self._directory / path)

    def fields(self, section: Section, *names: str) -> Section:
        """The section with the paths in these fields resolved."""
        given = {name: getattr(section, name) for name in names}
        return dataclasses.replace(
            section, **{name: self.path(path) for name, path in given.items() if path is not None}
        )

    def functions(self, section: Section, *names: str) -> Section:
        """The section with the files resolved that contain the functions in these fields."""
        given = {name: getattr(section, name) for name in names}
        files = {name: imports.file_of(path) for name, path in given.items() if path}
        return dataclasses.replace(
            section,
            **{
                name: imports.with_file(given[name], self.path(file))
                for name, file in files.items()
                if file is not None
            },
        )

    def program(self, program: ProgramConfig, run_dir: str) -> ProgramConfig:
        """The section `program` with its paths resolved. {RUN_DIR} at their beginning becomes the path `run_dir`.

        In `progress.checkpoints`, wildcard characters of these directories are escaped.
        """
        progress = program.progress
        if progress is not None and progress.checkpoints is not None:
            pattern = in_run_dir(progress.checkpoints, glob.escape(run_dir))
            pattern = os.path.join(glob.escape(str(self._directory)), pattern)  # noqa: PTH118
            progress = dataclasses.replace(progress, checkpoints=os.path.normpath(pattern))
        return dataclasses.replace(
            self.fields(program, "directory"),
            progress=self._file(progress, run_dir),
            stop=self._file(program.stop, run_dir),
            done=self._file(program.done, run_dir),
            deepspeed=program.deepspeed and self.fields(program.deepspeed, "model"),
        )

    def _file(self, section: Any, run_dir: str) -> Any:
        """A section of the program with its field `file` resolved. Null stays null."""
        if section is None or section.file is None:
            return section
        return dataclasses.replace(section, file=self.path(in_run_dir(section.file, run_dir)))

    def data(self, data: DataConfig) -> DataConfig:
        """The section `data` with the paths of its datasets, corpus, tokenizer and cache resolved."""
        blends: dict[str, Any] = {
            name: tuple(self.fields(dataset, "prefix") for dataset in getattr(data, name)) for name in BLENDS
        }
        return dataclasses.replace(
            self.fields(data, "cache_dir"),
            corpus=data.corpus and self._corpus(data.corpus),
            tokenizer=self.fields(data.tokenizer, "vocab_file", "merges_file", "tokenizer_file"),
            **blends,
        )

    def evaluation(self, evaluation: EvaluationSettings) -> EvaluationSettings:
        """The section `evaluation` with the paths of its texts and task files resolved."""
        return dataclasses.replace(
            self.fields(evaluation, "hf_home"),
            data=tuple(self.fields(text, "prefix") for text in evaluation.data),
            tasks=tuple(self.path(task) if is_task_file(task) else task for task in evaluation.tasks),
        )

    def _corpus(self, corpus: CorpusConfig) -> CorpusConfig:
        source = self.fields(corpus.source, "directory", "manifest")
        return dataclasses.replace(self.fields(corpus, "directory"), source=source)


def checkpoint_directory(config: RunConfig) -> str:
    """The directory of the run's checkpoints."""
    return config.checkpoint.save or f"{config.paths.run_dir}/checkpoints"


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
    yield from _run_dir_problems(config.paths.run_dir)
    for path, value in _trainer_paths(config):
        yield from _path_problems(path, value)


def _run_dir_problems(run_dir: str) -> Iterator[Problem]:
    if os.path.normpath(run_dir) in ("/", "//"):
        yield Problem("paths.run_dir", "is the root directory", "use a directory for this run only")


def _path_problems(path: str, value: str) -> Iterator[Problem]:
    if not value:
        yield Problem(path, "is empty", "set a path, or remove the key")
    elif reason := PATH.reason(value):
        yield Problem(path, reason)


def _trainer_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    for name in BLENDS:
        for index, dataset in enumerate(getattr(config.data, name)):
            yield f"data.{name}[{index}].prefix", dataset.prefix
    for index, text in enumerate(config.evaluation.data):
        yield f"evaluation.data[{index}].prefix", text.prefix
    for index, task in enumerate(config.evaluation.tasks):
        yield f"evaluation.tasks[{index}]", task
    for path, value in (
        ("data.cache_dir", config.data.cache_dir),
        ("data.tokenizer.vocab_file", config.data.tokenizer.vocab_file),
        ("data.tokenizer.merges_file", config.data.tokenizer.merges_file),
        ("data.tokenizer.tokenizer_file", config.data.tokenizer.tokenizer_file),
        ("checkpoint.save", config.checkpoint.save),
        ("checkpoint.load", config.checkpoint.load),
        ("evaluation.hf_home", config.evaluation.hf_home),
        ("generation.prompts", config.generation.prompts),
        ("generation.output", config.generation.output),
        ("export.directory", config.export.directory),
    ):
        if value is not None:
            yield path, value
    for path, value in (
        ("model.layer_spec", config.model.layer_spec),
        ("model.model_provider", config.model.model_provider),
        ("optimizer.lr_schedule", config.optimizer.lr_schedule),
    ):
        if value and (file := imports.file_of(value)) is not None:
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
        raise HpcgenError("data.corpus is missing", "set at least its directory and source")
    return CorpusJob(
        corpus=corpus, tokenizer=config.data.tokenizer, share=config.share, selection=selection(corpus)
    )


def manifest_of(corpus: CorpusConfig) -> str:
    """Path of the manifest, the list of the corpus's files that `hpcgen data plan` writes."""
    return f"{corpus.directory}/manifest.jsonl"


def similar_path(path: str) -> str | None:
    """An existing path with names spelled almost like those of `path`; None if there is none."""
    found = Path("/")
    for name in Path(path).parts[1:]:
        try:
            near = (
                name if (found / name).exists() else nearest(name, [entry.name for entry in found.iterdir()])
            )
        except OSError:
            return None
        if near is None:
            return None
        found /= near
    return str(found)
