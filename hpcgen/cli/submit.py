"""hpcgen submit: run stages through submitit, on Slurm or on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from hpcgen import api
from hpcgen.cli.options import (
    StageChoice,
    program,
    run_arguments,
    run_options,
    short_path,
    stage_list,
    templates_option,
    warn,
)
from hpcgen.cli.progress import shown_progress
from hpcgen.config.stages import STAGE_ROWS
from hpcgen.errors import JobStopped
from hpcgen.slurm.run_directory import sharing
from hpcgen.text import counted

if TYPE_CHECKING:
    from hpcgen.run_plan.plan import Plan
    from hpcgen.run_plan.stage import StagePlan
    from hpcgen.slurm.job import Job


SUBMITTED = tuple(name for name, stage in STAGE_ROWS.items() if stage.by_submitit)


@click.command("submit", epilog=stage_list(SUBMITTED))
@click.argument("stages", nargs=-1, required=True, type=StageChoice(SUBMITTED), metavar="STAGE...")
@run_options
@templates_option
@click.option(
    "--launcher",
    type=click.Choice(["slurm", "local"]),
    default="slurm",
    show_default=True,
    help="slurm queues jobs; local runs the stages on this machine's CPUs, one after another.",
)
@click.option("--dry-run", is_flag=True, help="Plan and check everything without submitting.")
def command(
    stages: tuple[str, ...],
    config: Path,
    overrides: tuple[str, ...],
    templates: tuple[Path, ...],
    launcher: Literal["slurm", "local"],
    dry_run: bool,
) -> None:
    """For example: hpcgen submit download prepare index-cache train -c run.yaml

    Each stage starts after the previous one has succeeded. Data stages submit only the tasks that still have output
    to produce.
    """
    from hpcgen.slurm import corpus

    plan = api.plan(api.load_run(config, overrides), stages)
    corpus.require_pairs(plan)
    warn(plan.warnings)
    if dry_run:
        missing = corpus.missing_tasks(plan)
        warn(tuple(corpus.check_corpus(plan, missing)))
        for stage in plan.stages:
            api.render(plan, stage, templates)
        would = [_would_submit(stage, missing.get(stage.name)) for stage in plan.stages.values()]
        click.echo(f"dry run: would submit {', '.join(would)}", err=True)
        return
    try:
        with shown_progress() if launcher == "local" else contextlib.nullcontext() as on_progress:
            jobs = api.submit(plan, launcher, templates, on_progress)
    except JobStopped:
        raise SystemExit(130) from None
    if launcher == "slurm":
        _show_jobs(plan, jobs)
    if launcher == "local" and plan.training is not None:
        _show_run(plan, run_arguments(config, overrides))
    for done in plan.stages.values() if launcher == "local" else ():
        if results := done.kind.results(plan.config):
            click.echo(f"{done.name}: results are in {results}")


def _would_submit(stage: StagePlan, tasks: tuple[int, ...] | None) -> str:
    """The stage's name, and for an array the number of tasks to submit."""
    if stage.allocation.array is None or tasks is None:
        return stage.name
    return f"{stage.name} ({len(tasks)} of {counted(stage.allocation.array.num_tasks, 'task')})"


def _show_jobs(plan: Plan, jobs: Sequence[Job]) -> None:
    """Prints job ID, stage and log of each job, and to stderr the stages and tasks that were not submitted."""
    submitted = {job.stage: job for job in jobs}
    for stage in plan.stages.values():
        job = submitted.get(stage.name)
        if job is None:
            click.echo(f"{stage.name}: complete; not submitted", err=True)
            continue
        click.echo(f"{job.job_id} {job.stage} {job.log}")
        if stage.allocation.array and job.tasks is not None:
            num_tasks, given = stage.allocation.array.num_tasks, len(job.tasks)
            rest = "" if given == num_tasks else "; the others have nothing to do"
            click.echo(f"{stage.name}: submitted {given} of {counted(num_tasks, 'task')}{rest}", err=True)


def _show_run(plan: Plan, arguments: str) -> None:
    """Prints the loss curve as text, saves it as a picture, and prints the paths and the next command.

    `arguments` are the options with which this call read the run file.
    """
    from hpcgen.report.curve import draw_png, draw_text, read_curve

    run_dir = Path(plan.config.paths.run_dir)
    curve = read_curve(run_dir)
    click.echo(draw_text(curve))
    with sharing(plan):
        picture = draw_png(curve, run_dir / "loss.png", title=plan.config.name)
    drawn = f", loss curve {picture}" if picture else " (for a picture of the loss: pip install matplotlib)"
    click.echo(f"run {run_dir}: checkpoints, metrics.jsonl, tensorboard{drawn}")
    click.echo(f"next: {program()} report {short_path(run_dir)}", err=True)
    queued = plan.training.queued if plan.training else None
    if queued is not None and queued.name not in plan.stages:
        command = f"{program()} submit {queued.name} --launcher local {arguments}"
        click.echo(f"no {queued.name} job was queued; run {command}", err=True)
