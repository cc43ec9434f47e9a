"""Waits for a job that a command has submitted, and cancels it if the command is interrupted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from hpcgen.slurm import sbatch
from hpcgen.slurm.processes import term_exits


def wait_for_job(job_id: str) -> None:
    """Prints the states of the job until it has ended. It is canceled if this process is interrupted."""
    click.echo(f"submitted job {job_id}; Ctrl-C cancels it", err=True)
    with term_exits(), _canceled_if_interrupted(job_id):
        for state in sbatch.states(job_id):
            click.echo(f"job {job_id}: {state}", err=True)


@contextlib.contextmanager
def _canceled_if_interrupted(job_id: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sbatch.cancel(job_id)
        click.echo(f"canceled job {job_id}", err=True)
        raise
