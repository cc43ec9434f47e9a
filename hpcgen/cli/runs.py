"""hpcgen runs: list the runs below a directory."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from hpcgen.cli.options import json_option
from hpcgen.cli.status_rows import ago, color_of, progress
from hpcgen.errors import HpcgenError
from hpcgen.redaction import redact_json
from hpcgen.runs.state import RunState
from hpcgen.slurm.job_files import SLURM_JOB
from hpcgen.text import harmless, padded

if TYPE_CHECKING:
    from hpcgen.runs.status import RunStatus


@click.command("runs")
@click.argument("root", default=".", type=click.Path(path_type=Path))
@click.option("--user", "users", multiple=True, metavar="NAME", help="Only runs of this owner; repeatable.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(get_args(RunState)),
    help="Only runs in this state; repeatable.",
)
@click.option("--job", metavar="ID", help="Only the run of this job.")
@click.option("--node", metavar="NAME", help="Only runs with a job on this node now.")
@click.option(
    "--depth",
    type=click.IntRange(min=0),
    default=4,
    show_default=True,
    metavar="N",
    help="Levels of directories below ROOT to look into.",
)
@json_option
def command(
    root: Path,
    users: tuple[str, ...],
    states: tuple[str, ...],
    job: str | None,
    node: str | None,
    depth: int,
    as_json: bool,
) -> None:
    """ROOT is a directory with run directories in it. Default: the current directory.

    Lists state, owner, progress and last activity of each run, the most recently active first. Asks Slurm once for the
    jobs of all runs. With --job or --node, also finds runs outside of ROOT if Slurm knows the job.
    """
    from hpcgen.runs.listing import list_runs

    if job is not None and not SLURM_JOB.fullmatch(job):
        raise HpcgenError(
            f"--job {job} is not a job ID", "use a number, or ARRAY_TASK for a task of an array"
        )
    now = time.time()
    found = list_runs(root, depth, now, job=job, node=node)
    shown = [
        status
        for status in found.runs
        if (not users or status.owner in users) and (not states or status.state in states)
    ]
    if as_json:
        click.echo(json.dumps([redact_json(dataclasses.asdict(status)) for status in shown], indent=1))
    else:
        _print(shown, root, now)
        for problem in found.problems:
            click.secho(harmless(problem), fg="yellow", err=True)


def _print(runs: Sequence[RunStatus], root: Path, now: float) -> None:
    """Prints a line for each run. The path comes last, since it has any length."""
    if not runs:
        click.echo("no run found", err=True)
        return
    titles = ("state", "owner", "active", "iteration", "run")
    rows = [
        (
            status.state,
            harmless(status.owner),
            ago(status.active, now) if status.active is not None else "-",
            progress(status.training) or "-",
            harmless(_short(status.directory, root)),
        )
        for status in runs
    ]
    for row, cells in zip((titles, *rows), padded((titles, *rows)), strict=True):
        color = color_of(row[0]) if row is not titles else None
        cells[0] = click.style(cells[0], fg=color, bold=row is titles)
        click.echo("  ".join(cells).rstrip())


def _short(directory: str, root: Path) -> str:
    """The path below ROOT."""
    path = Path(directory)
    return str(path.relative_to(root)) if path.is_relative_to(root) and path != root else directory
