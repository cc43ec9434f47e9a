"""Shared options of the data commands, and running and reporting a task."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpcgen.cli.options import run_options
from hpcgen.config.stages import STAGE_ROWS
from hpcgen.errors import HpcgenError, JobFailed

if TYPE_CHECKING:
    from hpcgen.config.corpus import CorpusJob
    from hpcgen.config.run import RunConfig

Command = TypeVar("Command", bound=Callable[..., Any])
_MOST_ERRORS_SHOWN = 20


def corpus_options(command: Command) -> Command:
    """Adds --config and --set."""
    return run_options(command, help="The run file, or a job's corpus.json.")


def task_options(command: Command) -> Command:
    """Adds the options that select a task and its workers, and --json."""
    options = (
        click.option(
            "--task-id",
            type=click.IntRange(min=0),
            metavar="T",
            default=0,
            show_default=True,
            help="Task of the array, which produces the outputs T, T + N, T + 2 N and so on.",
        ),
        click.option(
            "--num-tasks",
            type=click.IntRange(min=1),
            metavar="N",
            default=1,
            show_default=True,
            help="Number of tasks in the array. Does not affect the outputs.",
        ),
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            metavar="N",
            help="Number of outputs produced in parallel.  [default: one per core; for downloads, "
            "data.corpus.download_connections]",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print the report as JSON."),
    )
    for option in reversed(options):
        command = option(command)
    return corpus_options(command)


def verify_option(command: Command) -> Command:
    """Adds --verify-fraction, for commands that tokenize."""
    return click.option(
        "--verify-fraction",
        type=click.FloatRange(min=0, max=1),
        metavar="F",
        help="Fraction of documents whose token IDs are compared with those of Hugging Face tokenizers.  "
        "[default: data.corpus.verify_fraction, 0.0001]",
    )(command)


def read_job(config: Path, overrides: tuple[str, ...]) -> CorpusJob:
    """The corpus of a run file or of a job's corpus.json.

    Raises:
        ConfigErrors: the file is invalid.
        HpcgenError: the file cannot be read, or the existing manifest was planned for another selection of files.
    """
    from hpcgen.data.manifest import require_selection
    from hpcgen.planning.paths import corpus_job

    job = (
        _read_job_file(config, overrides)
        if config.suffix == ".json"
        else corpus_job(_read_run(config, overrides))
    )
    require_selection(job)
    return job


def read_job_to_plan(config: Path, overrides: tuple[str, ...]) -> CorpusJob:
    """The corpus of a run file, including its source.

    Raises:
        ConfigErrors: the file is invalid.
        HpcgenError: the file cannot be read or is not a run file.
    """
    from hpcgen.planning.paths import planning_job

    if config.suffix == ".json":
        raise HpcgenError(f"{config} is a job's input and names no source", "use -c with the run file")
    return planning_job(_read_run(config, overrides, with_source=True))


def _read_job_file(config: Path, overrides: tuple[str, ...]) -> CorpusJob:
    from hpcgen.config.corpus import CorpusJob
    from trainer.contract.config import ConfigError, from_dict
    from trainer.contract.files.shared_files import read_configuration

    if overrides:
        raise HpcgenError(
            f"--set cannot change {config}, which is a job's input", "use --set with the run file"
        )
    try:
        document = json.loads(read_configuration(config))
        return from_dict(CorpusJob, document, where=str(config))
    except OSError as error:
        raise HpcgenError(f"cannot read {config}: {error.strerror}") from error
    except (ValueError, ConfigError) as error:
        raise HpcgenError(f"{config}: {error}") from error


def _read_run(config: Path, overrides: tuple[str, ...], *, with_source: bool = False) -> RunConfig:
    """Reads a run file and checks its corpus, the only section that data stages need. Its paths become absolute.

    `with_source` also checks the source directory, which only planning reads, and warns of a missing tokenizer, which
    planning does not need.
    """
    from hpcgen.cli.options import warn
    from hpcgen.config.corpus import problems
    from hpcgen.config.loader import load_run
    from hpcgen.config.presets import missing_tokenizer
    from hpcgen.config.validation import located
    from hpcgen.data.sources.directory import directory_problem
    from hpcgen.errors import ConfigErrors
    from hpcgen.planning.paths import absolute_paths

    run = load_run(config, overrides)
    absolute = absolute_paths(run.config, run.directory)
    corpus = absolute.data.corpus
    wrong = [] if corpus is None else list(problems(corpus))
    if with_source and corpus is not None and corpus.source.directory:
        source, own = Path(corpus.source.directory), Path(corpus.directory)
        wrong += filter(None, [directory_problem(source, exclude=own)])
    if wrong:
        raise ConfigErrors([located(problem, run.document, run.config) for problem in wrong])
    tokenizer = absolute.data.tokenizer.tokenizer_file
    if with_source and tokenizer and not Path(tokenizer).exists():
        problem = missing_tokenizer(absolute.preset, tokenizer, "prepare")
        warn((str(located(problem, run.document, run.config)),))
    return absolute


def run_stage(
    stage: str,
    config: Path,
    overrides: tuple[str, ...],
    task_id: int,
    num_tasks: int,
    workers: int | None,
    as_json: bool,
    verify_fraction: float | None = None,
) -> None:
    """Runs one task of a stage, shows its progress and prints its report.

    Raises:
        JobFailed: some outputs could not be produced. The message lists them with the reasons.
    """
    from hpcgen.cli.data.progress import shown
    from hpcgen.cli.options import warn
    from hpcgen.data.manifest import manifest_path, read_manifest
    from hpcgen.data.space import check_space
    from hpcgen.data.task import run_task
    from hpcgen.files import shared_as
    from hpcgen.slurm.processes import term_exits

    job = read_job(config, overrides)
    if verify_fraction is not None:
        corpus = dataclasses.replace(job.corpus, verify_fraction=verify_fraction)
        job = dataclasses.replace(job, corpus=corpus)
    manifest = read_manifest(manifest_path(job.directory))
    if STAGE_ROWS[stage].makes_pairs and job.tokenizer.kind != "bytes":
        from hpcgen.data.tokenizer import missing_gigatoken

        warn(tuple(filter(None, [missing_gigatoken()])))
    warn(tuple(check_space(stage, job, manifest, task_id=task_id, num_tasks=num_tasks)))
    with shared_as(job.share), term_exits(), shown() as on_progress:
        report = run_task(
            stage,
            job,
            manifest,
            task_id=task_id,
            num_tasks=num_tasks,
            workers=workers,
            on_progress=on_progress,
        )
    click.echo(json.dumps(report.to_dict()) if as_json else str(report))
    if report.errors:
        shown_errors = list(report.errors[:_MOST_ERRORS_SHOWN])
        if len(report.errors) > len(shown_errors):
            shown_errors.append(f"and {len(report.errors) - len(shown_errors):,} more")
        raise JobFailed("\n".join(shown_errors))
