"""Shared options of the data commands, and running and reporting a task."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from hpcgen.cli.data.progress import shown
from hpcgen.cli.options import run_options, warn
from hpcgen.config.stages import STAGE_ROWS
from hpcgen.errors import JobFailed
from hpcgen.files import shared_as
from hpcgen.slurm.processes import term_exits

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
    from hpcgen.data import manifest, space, task
    from hpcgen.run_plan.corpus_job import read_job

    job = read_job(config, overrides)
    if verify_fraction is not None:
        corpus = dataclasses.replace(job.corpus, verify_fraction=verify_fraction)
        job = dataclasses.replace(job, corpus=corpus)
    planned = manifest.planned(job)
    if STAGE_ROWS[stage].makes_pairs and job.tokenizer.kind != "bytes":
        from hpcgen.data.tokenizer import missing_gigatoken

        warn(tuple(filter(None, [missing_gigatoken()])))
    warn(tuple(space.check_space(stage, job, planned, task_id=task_id, num_tasks=num_tasks)))
    with shared_as(job.share), term_exits(), shown() as on_progress:
        report = task.run_task(
            stage,
            job,
            planned,
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
