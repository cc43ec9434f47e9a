"""The paths of a run: relative paths become absolute, and invalid ones are reported."""

from __future__ import annotations

import dataclasses
import glob
import os.path
from collections.abc import Iterator
from pathlib import Path

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.corpus import ChatConfig, CorpusConfig, CorpusJob, blend, selection
from hpcgen.config.program import in_run_dir
from hpcgen.config.run import RunConfig
from hpcgen.errors import FilePlace, HpcgenError, Problem
from trainer.contract.code import imports
from trainer.contract.config import BlendConfig, NamedPath, PathKind, with_paths
from trainer.contract.evaluation import is_task_file


def absolute_paths(config: RunConfig, directory: Path) -> RunConfig:
    """`config` with every relative path resolved against `directory`, the directory of the run file.

    Raises:
        HpcgenError: the path of the run directory contains %, which sbatch would expand in the name of the log.
    """
    run_dir = _joined(str(directory), config.paths.run_dir)
    if "%" in run_dir:
        raise HpcgenError(
            "the path contains %, which sbatch would expand in the name of the log",
            "move the run file, or set paths.run_dir to an absolute path",
            where=FilePlace(run_dir),
        )
    config = with_paths(config, lambda named: _absolute(named, str(directory), run_dir))
    return dataclasses.replace(config, paths=dataclasses.replace(config.paths, run_dir=run_dir))


def _absolute(named: NamedPath, directory: str, run_dir: str) -> str:
    """The text of `named` with its path resolved. {RUN_DIR} at its beginning becomes the path `run_dir`."""
    text = named.text
    if named.kind is PathKind.FUNCTION:
        file = imports.file_of(text)
        return text if file is None else imports.with_file(text, _joined(directory, file))
    if named.kind is PathKind.TASK and not is_task_file(text):
        return text
    if named.kind is PathKind.PATTERN:  # wildcard characters of these directories stand for themselves
        return _joined(glob.escape(directory), in_run_dir(text, glob.escape(run_dir)))
    return _joined(directory, in_run_dir(text, run_dir) if named.kind is PathKind.IN_RUN_DIR else text)


def _joined(directory: str, path: str) -> str:
    return os.path.normpath(os.path.join(directory, path))  # noqa: PTH118


def checkpoint_directory(config: RunConfig) -> str:
    """The directory of the run's checkpoints."""
    return config.checkpoint.save or f"{config.paths.run_dir}/checkpoints"


def import_files(config: RunConfig) -> tuple[str, ...]:
    """The files that contain custom functions of the trainer."""
    files = map(imports.file_of, imports.named(config).values())
    return tuple(dict.fromkeys(file for file in files if file is not None))


def chat_of(config: RunConfig) -> ChatConfig:
    """How chats become text: as in the corpus, or else with the tokenizer's own template."""
    corpus = config.data.corpus
    return (corpus.chat if corpus is not None else None) or ChatConfig()


def trainer_data(config: RunConfig) -> BlendConfig:
    """The blend that the trainer reads: the one in the run file, or else the pairs of the corpus.

    Pairs of a corpus of chats are read as chats.
    """
    data = config.data
    fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(BlendConfig)}
    if data.corpus is not None and reads_corpus(config):
        fields |= blend(data.corpus)
        fields["sft"] = data.sft or data.corpus.chat is not None
    return BlendConfig(**fields)


def reads_corpus(config: RunConfig) -> bool:
    """Returns whether the trainer reads the pairs of the corpus, because the run file names no others."""
    data = config.data
    return data.corpus is not None and not (data.datasets or data.train or data.dataset or data.mock)


def sft_problems(config: RunConfig, given: bool | None) -> Iterator[Problem]:
    """Yields the problem of a run on chats with a corpus of texts, or of a run on texts with a corpus of chats.

    `given` is data.sft in the run file; None without it.
    """
    corpus = config.data.corpus
    if corpus is None or not reads_corpus(config):
        return
    if config.data.sft and corpus.chat is None:
        reason = "requires pairs of chats, but data.corpus has no chat"
        yield Problem("data.sft", reason, "set data.corpus.chat: {}", about=("data.corpus",))
    if given is False and corpus.chat is not None:
        reason = "contradicts data.corpus.chat, whose pairs have a loss mask: only answers are learned"
        hint = "remove it; to learn every token, make a corpus of texts, without data.corpus.chat"
        yield Problem("data.sft", reason, hint, about=("data.corpus.chat",))


def run_dir_problems(config: RunConfig) -> Iterator[Problem]:
    """Yields the problem of a run directory that other runs would share."""
    if os.path.normpath(config.paths.run_dir) in ("/", "//"):
        yield Problem("paths.run_dir", "is the root directory", "use a directory for this run only")


def scratch_warnings(config: RunConfig, cluster: ClusterConfig, *, is_set: bool) -> Iterator[Problem]:
    """Yields a warning for a run directory within the scratch directory, which `is_set` by a profile.

    Without a profile's value, scratch is /tmp, where tests and trials on one machine may have their runs too.
    """
    if is_set and Path(config.paths.run_dir).is_relative_to(cluster.scratch):
        reason = f"is in {cluster.scratch}, the profile's scratch, which should be a disk of each node"
        hint = "use a directory on shared storage, or correct scratch in the profile"
        yield Problem("paths.run_dir", reason, hint)


def corpus_job(config: RunConfig) -> CorpusJob:
    """The input of a run's data stages. The paths of `config` are absolute.

    The input is written into scripts and job directories, so it omits the URLs of the source, which may contain
    signatures. The manifest contains them.

    Raises:
        HpcgenError: the run has no corpus.
    """
    job = planning_job(config)
    source = dataclasses.replace(job.corpus.source, huggingface=None, url=None, directory=None, manifest=None)
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
