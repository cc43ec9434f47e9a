"""hpcgen data status: show the progress of a corpus's stages and their unfinished tasks."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.cli.data.stage import corpus_options
from hpcgen.cli.options import StageChoice, json_option, program, run_arguments
from hpcgen.config.stages import STAGE_ROWS
from hpcgen.errors import HpcgenError
from hpcgen.text import counted, duration, padded, size_text

if TYPE_CHECKING:
    from hpcgen.data.status import StageStatus, TaskStatus

PAIR_STAGES = tuple(name for name, stage in STAGE_ROWS.items() if stage.makes_pairs)
"""Stages that produce the final pairs."""
SHOWN_TASKS = 20
"""Maximum number of failed or stalled tasks printed per stage."""
COLORS = {"running": "cyan", "failed": "red", "stalled": "yellow", "ended": "yellow"}
_STAGE = StageChoice(name for name, stage in STAGE_ROWS.items() if stage.is_array)


@click.command("status")
@click.argument("stages", metavar="[STAGE]...", nargs=-1, type=_STAGE)
@corpus_options
@click.option(
    "--missing",
    type=_STAGE,
    metavar="STAGE",
    help="Print the unfinished tasks of STAGE as an argument for sbatch --array. Exits with status 1 if none are left.",
)
@click.option(
    "--num-tasks",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --missing: number of tasks in the array.  [default: as planned by the run file]",
)
@json_option
def command(
    stages: tuple[str, ...],
    config: Path,
    overrides: tuple[str, ...],
    missing: str | None,
    num_tasks: int | None,
    as_json: bool,
) -> None:
    """Default for STAGE: the stages in use, either download and prepare or download, extract, concat and tokenize."""
    if missing is not None:
        if stages:
            raise HpcgenError(
                f"--missing {missing} cannot be combined with {', '.join(stages)}",
                "name one stage, after --missing",
            )
        _print_missing(missing, config, overrides, num_tasks, as_json)
        return
    if num_tasks is not None:
        raise HpcgenError("--num-tasks requires --missing", "omit it; status shows every task")
    from hpcgen.data import manifest, status
    from hpcgen.run_plan.corpus_job import read_job

    job = read_job(config, overrides)
    planned = manifest.planned(job)
    found = status.corpus_status(job, planned, stages, time.time())
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(stage) for stage in found], indent=1))
        return
    _print_table(found)
    for stage in found:
        _print_counts(stage)
    _print_trouble(found, config, overrides)


def _print_missing(
    stage: str, config: Path, overrides: tuple[str, ...], num_tasks: int | None, as_json: bool
) -> None:
    """Prints the unfinished tasks. Exits with 1 if there are none, as grep does, so that && does not submit."""
    from hpcgen.data import manifest, pending
    from hpcgen.run_plan.corpus_job import planned_array, read_job

    array = planned_array(stage, config, overrides, num_tasks)
    job = read_job(config, overrides)
    planned = manifest.planned(job)
    tasks = pending.pending(stage, job, planned).tasks(array.num_tasks)
    if as_json:
        click.echo(json.dumps({"stage": stage, "num_tasks": array.num_tasks, "missing": tasks}))
    elif tasks:
        click.echo(array.option(tasks))
    click.echo(f"{stage}: {len(tasks)} of {counted(array.num_tasks, 'task')} not done", err=True)
    if not tasks:
        sys.exit(1)


def _print_table(found: Sequence[StageStatus]) -> None:
    titles = ("stage", "done", "running", "failed", "missing", "read", "documents", "tokens", "rate", "left")
    rows = [tuple(_cells(stage)) for stage in found]
    heading, *lines = padded((titles, *rows), right=range(1, len(titles)))
    click.secho("  ".join(heading), bold=True)
    for stage, cells in zip(found, lines, strict=True):
        colors = {
            0: "green" if stage.done == stage.units else None,
            2: "cyan" if stage.running else None,
            3: "red" if stage.failed else None,
            4: "yellow" if stage.missing else None,
        }
        click.echo("  ".join(_colored(cells, colors)))


def _cells(stage: StageStatus) -> Iterator[str]:
    yield stage.stage
    yield f"{stage.done:,} of {stage.units:,}"
    yield from (f"{count:,}" if count else "-" for count in (stage.running, stage.failed, stage.missing))
    yield (
        f"{size_text(stage.bytes_done)} of {size_text(stage.bytes)}"
        if stage.bytes
        else size_text(stage.bytes_done)
    )
    yield from (f"{count:,}" if count else "-" for count in (stage.documents, stage.tokens))
    yield f"{size_text(round(stage.bytes_per_second))}/s" if stage.bytes_per_second else "-"
    yield duration(round(stage.remaining_s)) if stage.remaining_s is not None else "-"


def _colored(cells: Sequence[str], colors: Mapping[int, str | None]) -> Iterator[str]:
    for column, cell in enumerate(cells):
        color = colors.get(column)
        yield click.style(cell, fg=color) if color else cell


def _print_counts(stage: StageStatus) -> None:
    """Prints what became of every document of the finished outputs, and the tokens of each split."""
    counts = stage.counts
    if counts.documents_in:
        click.echo(f"{stage.stage}: {counted(counts.documents_in, 'document')} in = {counts.outcome}")
    if stage.rejects:
        click.echo(f"{stage.stage}: rejected: {stage.rejects}")
    for warning in counts.warnings:
        click.secho(f"{stage.stage}: warning: {warning}", fg="yellow")
    if stage.tokens_of_split:
        splits = ", ".join(f"{split} {tokens:,}" for split, tokens in stage.tokens_of_split.items())
        click.echo(f"{stage.stage}: tokens in complete pairs: {splits}")


def _print_trouble(found: Sequence[StageStatus], config: Path, overrides: Sequence[str]) -> None:
    """Prints stopped tasks with unfinished outputs, running tasks with failures, and how to continue."""
    is_open = [stage for stage in found if stage.done < stage.units]
    if any(stage.stage in PAIR_STAGES and stage.done == stage.units for stage in found):
        for stage in is_open:
            click.echo(f"{stage.stage}: no longer needed, because the pairs are complete", err=True)
        return
    in_trouble = [_print_tasks_in_trouble(stage) for stage in found]
    if any(in_trouble):
        stages = " ".join(stage.stage for stage in is_open)
        command = f"{program()} submit {stages} {run_arguments(config, overrides)}"
        click.echo(f"to finish the rest, run {command} (finished outputs are kept)", err=True)


def _print_tasks_in_trouble(stage: StageStatus) -> bool:
    """Prints the failed and stalled tasks of a stage. Returns True if there are any."""
    trouble = [task for task in stage.tasks if task.state != "running" or task.failed]
    for task in trouble[:SHOWN_TASKS]:
        for line in _trouble(stage.stage, task):
            click.echo(line)
    if len(trouble) > SHOWN_TASKS:
        click.echo(f"and {len(trouble) - SHOWN_TASKS} more tasks of {stage.stage} (--json lists them all)")
    return bool(trouble)


def _trouble(stage: str, task: TaskStatus) -> Iterator[str]:
    name = click.style(f"{stage} task {task.task_id} of {task.num_tasks}", bold=True)
    state = click.style(task.state, fg=COLORS[task.state])
    ago, left = f"on {task.host}, {duration(round(task.silent_s))} ago", f"{task.units_left:,} not done"
    yield {
        "running": f"{name}: {state} on {task.host}, {task.failed:,} failed, {left}",
        "failed": f"{name}: {state} {ago}, {left}",
        "stalled": f"{name}: {state}, last report {ago}, {left}",
        "ended": f"{name}: {state} {ago}, {left}",
    }[task.state]
    if task.errors:
        yield f"    {_one_line(task.errors[0])}"
    if len(task.errors) > 1:
        yield f"    and {len(task.errors) - 1:,} more (--json lists them all)"


def _one_line(error: str) -> str:
    """An error on one line; a traceback is reduced to its last line."""
    lines = error.strip().splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0].partition(': ')[0]}: {lines[-1]}"
