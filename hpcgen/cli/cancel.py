"""hpcgen cancel: cancel all jobs of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.cli.options import program, short_path
from hpcgen.cli.run_argument import run_directory

if TYPE_CHECKING:
    from hpcgen.runs.control import RunJobs


@click.command("cancel")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("-y", "--yes", is_flag=True, help="Do not ask before a job that trains is canceled.")
def command(run: Path, yes: bool) -> None:
    """RUN is a run directory or a run file.

    Cancels all jobs of the run at once, those in the queue too. Training usually has no time to save: see hpcgen stop.
    On a terminal, asks first if a job trains.
    """
    from hpcgen.runs import control

    directory = run_directory(run)
    jobs = control.find_jobs(directory)
    if not jobs.own and not jobs.local:
        click.echo(f"nothing to cancel: {jobs.why_nothing_runs()}")
        return
    if not yes:
        _ask(jobs, directory)
    if jobs.own:
        control.cancel([job.job for job in jobs.own])
        click.echo(f"canceled {', '.join(f'{job.job} ({job.stage})' for job in jobs.own)}")
    for job in jobs.local:
        control.end_local(job)
        click.echo(f"ended {job.job} ({job.stage}), which runs on this machine")
    if jobs.others:
        click.echo(f"left alone: {jobs.why_nothing_runs()}", err=True)


def _ask(jobs: RunJobs, directory: Path) -> None:
    """Asks on a terminal before a job that trains is canceled. Elsewhere, the command was meant."""
    job = jobs.training or jobs.local_training
    if job is None or not sys.stdin.isatty():
        return
    click.echo(f"{program()} stop {short_path(directory)} saves a checkpoint first", err=True)
    click.confirm(
        f"job {job.job} trains: cancel it and lose the steps since its last checkpoint?", abort=True
    )
