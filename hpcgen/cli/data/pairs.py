"""The pairs of a run file, for the commands that inspect pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpcgen.cli.data.stage import read_job
from hpcgen.cli.options import override_option

if TYPE_CHECKING:
    from hpcgen.config.corpus import CorpusJob
    from hpcgen.config.tokenizer import TokenizerConfig

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class RunPairs:
    """The pairs that a run trains on, with their tokenizer."""

    prefixes: tuple[Path, ...]
    tokenizer: TokenizerConfig
    job: CorpusJob | None
    """The job that produces the pairs; None if they come from elsewhere."""


def run_file_option(help: str) -> Callable[[Command], Command]:
    """Adds --config and --set, both optional."""

    def add(command: Command) -> Command:
        return click.option(
            "-c", "--config", "config", type=click.Path(path_type=Path), metavar="RUN.YAML", help=help
        )(override_option(command))

    return add


def read_pairs(config: Path, overrides: tuple[str, ...]) -> RunPairs:
    """The pairs of a run file or of a job's corpus.json.

    Raises:
        ConfigErrors: the file is invalid.
    """
    from hpcgen.config.corpus import blend
    from hpcgen.config.loader import load_run
    from hpcgen.errors import ConfigErrors
    from hpcgen.planning.paths import absolute_paths, corpus_job, trainer_data

    if config.suffix == ".json":
        corpus_of_job = read_job(config, overrides)
        made = [dataset for part in blend(corpus_of_job.corpus).values() for dataset in part]
        return RunPairs(
            tuple(Path(dataset.prefix) for dataset in made), corpus_of_job.tokenizer, corpus_of_job
        )
    run = load_run(config, overrides)
    if run.mistakes:
        raise ConfigErrors(run.mistakes)
    absolute = absolute_paths(run.config, run.directory)
    data = trainer_data(absolute)
    named = (*data.datasets, *data.train, *data.valid, *data.test)
    prefixes = tuple(dict.fromkeys(Path(dataset.prefix) for dataset in named))
    job = corpus_job(absolute) if absolute.data.corpus is not None else None
    return RunPairs(prefixes, absolute.data.tokenizer, job)
