"""hpcgen stop: ask a run to save a checkpoint and to leave the queue."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.cli.options import program, short_path
from hpcgen.cli.run_argument import run_directory
from hpcgen.config.stages import has_attempts
from hpcgen.errors import JobFailed
from hpcgen.text import harmless

if TYPE_CHECKING:
    from hpcgen.runs.attempts import JobAttempt
    from hpcgen.runs.slurm import QueuedJob

ANSWER_S = 30.0
"""With --no-wait: time in which the job's script takes the request. A busy node needs seconds."""


@click.command("stop")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--no-wait", is_flag=True, help="Return when the job has taken the request.")
def command(run: Path, no_wait: bool) -> None:
    """RUN is a run directory or a run file.

    The job that trains saves a checkpoint at the end of its step and leaves, without a requeue. Jobs that wait to train
    are canceled, and other stages go on. Waits until the checkpoint is saved; Ctrl-C ends only the waiting.
    """
    from hpcgen.runs import control

    directory = run_directory(run)
    jobs = control.find_jobs(directory)
    asked = time.time()
    if jobs.waiting:
        ids = [job.job for job in jobs.waiting]
        control.cancel(ids)
        click.echo(f"canceled {', '.join(ids)}, waiting in the queue")
    if jobs.training is not None:
        if control.ask_to_stop(directory, jobs.training.job):
            _follow(directory, jobs.training.job, asked, no_wait=no_wait)
        else:
            click.echo(f"canceled {jobs.training.job}, which had nothing to save: its script had not begun")
    elif (local := jobs.local_training) is not None:
        control.ask_local_to_stop(directory, local.job)
        _follow(directory, local.job, asked, no_wait=no_wait)
    elif not jobs.waiting:
        click.echo(f"nothing to stop: {jobs.why_nothing_runs()}")
    going_on: tuple[QueuedJob | JobAttempt, ...] = (*jobs.own, *jobs.local)
    others = [f"{job.job} ({job.stage})" for job in going_on if not has_attempts(job.stage)]
    if others:
        hint = f"{program()} cancel {short_path(directory)} ends them"
        click.echo(f"other jobs go on: {', '.join(others)}; {hint}", err=True)


def _follow(directory: Path, job: str, asked: float, *, no_wait: bool) -> None:
    """Waits until the job has ended, and says how.

    Raises:
        JobFailed: it did not end as asked.
    """
    from hpcgen.runs import control

    again, shown = f"{program()} resume {short_path(directory)}", ""
    for step in control.follow_stop(directory, job, asked):
        if step != shown:
            _say(step, job)
            shown = step
        if no_wait and (step == "taken" or time.time() > asked + ANSWER_S):
            return
    control.withdraw(directory, job)
    if step == "lost":
        raise JobFailed(
            f"job {job} was killed before it could say that it saved; {again} continues from the newest checkpoint"
        )
    attempt = control.last_attempt(directory, job)
    if step == "ended" and attempt is not None and attempt.verdict == "failed":
        raise JobFailed(f"job {job} failed: {harmless(attempt.reason)}")
    if step == "ended" and attempt is not None:
        click.echo(f"job {job}: {harmless(attempt.reason)}")
    if step == "ended" and attempt is not None and attempt.verdict == "done":
        return
    click.echo(f"to continue: {again}", err=True)


def _say(step: str, job: str) -> None:
    said = {
        "asked": f"asked job {job} to save and stop; Ctrl-C ends only this waiting",
        "taken": f"job {job} has the request, and saves at the end of its step",
        "canceled": f"job {job} saved and went back into the queue; canceled it there",
    }
    if step in said:
        click.echo(said[step], err=step != "canceled")
