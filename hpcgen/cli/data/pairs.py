"""What a run file says of its pairs, for the commands that look at pairs."""

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
    """The pairs that a run trains on, and what made them."""

    prefixes: tuple[Path, ...]
    tokenizer: TokenizerConfig
    job: CorpusJob | None
    """None where the pairs were made by other means."""


def run_file_option(help: str) -> Callable[[Command], Command]:
    """--config and --set, neither of them needed."""

    def add(command: Command) -> Command:
        return click.option(
            "-c", "--config", "config", type=click.Path(path_type=Path), metavar="RUN.YAML", help=help
        )(override_option(command))

    return add


def read_pairs(config: Path, overrides: tuple[str, ...]) -> RunPairs:
    """The pairs of a run file, or of the corpus.json of a job.

    Raises:
        ConfigErrors: the file has mistakes.
    """
    from hpcgen.config.corpus import blend
    from hpcgen.config.loader import load_run
    from hpcgen.errors import ConfigErrors
    from hpcgen.planning.paths import absolute_paths, corpus_job, trainer_data

    if config.suffix == ".json":
        of_job = read_job(config, overrides)
        made = [dataset for part in blend(of_job.corpus).values() for dataset in part]
        return RunPairs(tuple(Path(dataset.prefix) for dataset in made), of_job.tokenizer, of_job)
    run = load_run(config, overrides)
    if run.mistakes:
        raise ConfigErrors(run.mistakes)
    absolute = absolute_paths(run.config, run.directory)
    data = trainer_data(absolute)
    named = (*data.datasets, *data.train, *data.valid, *data.test)
    prefixes = tuple(dict.fromkeys(Path(dataset.prefix) for dataset in named))
    job = corpus_job(absolute) if absolute.data.corpus is not None else None
    return RunPairs(prefixes, absolute.data.tokenizer, job)
