"""Measures layouts for `hpcgen tune`: follows the job until all have a result, and writes the fastest one."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpcgen import api
from hpcgen.cli.options import program, run_arguments, warn
from hpcgen.config.document import read_text
from hpcgen.config.edits import with_values
from hpcgen.errors import HpcgenError, JobFailed
from hpcgen.files import replace_text, require_writable
from hpcgen.planning.measured_file import add_measured
from hpcgen.planning.trials import changes
from hpcgen.run_plan import trials
from hpcgen.run_plan.outcomes import Outcomes, conclusions, in_json, reason, table
from hpcgen.run_plan.plan import Plan
from hpcgen.run_plan.trials import Candidate
from hpcgen.slurm import sbatch, tuning
from hpcgen.text import counted


def tune(
    config: Path,
    overrides: tuple[str, ...],
    top: int,
    steps: int | None,
    templates: tuple[Path, ...],
    *,
    retry: bool,
    no_wait: bool,
    no_write: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Measures the layouts that have no result yet, writes the fastest into the run file, and prints all.

    Raises:
        HpcgenError: the run file is invalid or cannot be written, or Slurm refuses the job.
        JobFailed: a layout has no result, or none was measured.
    """
    if not (dry_run or no_write or _not_of_tune(overrides)):
        require_writable(config)
    with_steps = (*overrides, *(f"tune.steps={number}" for number in (steps,) if number is not None))
    run = trials.with_candidates(api.load_run(config, with_steps), top)
    plan = api.plan(run, [trials.STAGE])
    warn(plan.warnings)
    candidates = trials.candidates(plan)
    if retry and not dry_run:
        tuning.forget_failures(plan, candidates)
    again = f"{program()} tune {run_arguments(config, with_steps)}"
    outcomes = Outcomes.of(candidates, tuning.read_results(plan, candidates))
    if outcomes.missing and not dry_run:
        job_id = _job(plan, len(outcomes.missing), templates)
        if no_wait:
            click.echo(job_id)
            click.echo(f"to follow it: {again}", err=True)
            return
        _follow(plan, candidates, job_id, again)
        outcomes = Outcomes.of(candidates, tuning.read_results(plan, candidates))
    if not dry_run:
        _keep_calibration(plan)
    written = None if dry_run or no_write else _write(config, overrides, outcomes)
    _show(outcomes, written, as_json=as_json)
    if not dry_run:
        _require_results(plan, outcomes, again)


def _job(plan: Plan, number: int, templates: tuple[Path, ...]) -> str:
    """The job that measures what is missing: the one in the queue, or a new one."""
    if (job_id := tuning.submitted_job(plan)) is not None:
        click.echo(f"job {job_id} is in the queue", err=True)
        return job_id
    job_id = tuning.submit(plan, api.render(plan, tuning.STAGE, templates))
    click.echo(f"submitted job {job_id}, which measures {counted(number, 'layout')}", err=True)
    return job_id


def _follow(plan: Plan, candidates: list[Candidate], job_id: str, again: str) -> None:
    """Prints the states of the job and the results of its trials until it has ended."""
    shown = set(tuning.read_results(plan, candidates))

    def show_new_results() -> None:
        for key, result in tuning.read_results(plan, candidates).items():
            if key not in shown:
                name = next(each.trial.name for each in candidates if each.trial.key == key)
                figure = result.status if result.step_s is None else f"{result.step_s:.4g} s per step"
                click.echo(f"{name}: {figure}", err=True)
                shown.add(key)

    try:
        click.echo("Ctrl-C leaves the job running", err=True)
        for state in sbatch.states(job_id, show_new_results):
            click.echo(f"job {job_id}: {state}", err=True)
        tuning.wait_for_results(plan, candidates)
        show_new_results()
    except KeyboardInterrupt:
        click.echo(f"job {job_id} continues; to follow it: {again}; to cancel it: scancel {job_id}", err=True)
        raise


def _keep_calibration(plan: Plan) -> None:
    """Adds what the job has measured for predictions to the file of the cluster."""
    if (result := tuning.calibration(plan)) is None:
        return
    try:
        click.echo(f"wrote {add_measured(plan.run, result)}, which later predictions use", err=True)
    except HpcgenError as error:  # the layouts are measured nevertheless
        warn([f"predictions stay as they are: {error}"])


def _not_of_tune(overrides: tuple[str, ...]) -> list[str]:
    """The values of --set without which a layout was not measured, so that it is not written."""
    return [each for each in overrides if not each.startswith(("tune.", "slurm.tune."))]


def _write(config: Path, overrides: tuple[str, ...], outcomes: Outcomes) -> Path | None:
    """Writes the fastest layout into the run file, if it is better than the run's. Returns the file if it changed."""
    best = outcomes.better
    if best is None:
        return None
    if others := _not_of_tune(overrides):
        warn([f"{config} was not changed, since it was measured with --set {' --set '.join(others)}"])
        return None
    values = changes(best.candidate.trial.overrides)
    replace_text(config, with_values(read_text(config), str(config), values, reason(best, outcomes.own)))
    return config


def _show(outcomes: Outcomes, written: Path | None, *, as_json: bool) -> None:
    if as_json:
        best = outcomes.fastest
        document = {
            "trials": in_json(outcomes),
            "fastest": best and best.name,
            "written": written and str(written),
        }
        click.echo(json.dumps(document, indent=1))
        return
    for line in (*table(outcomes), *conclusions(outcomes)):
        click.echo(line)
    if written is not None and (best := outcomes.better) is not None:
        click.echo(f"wrote {written}: {' '.join(best.candidate.trial.overrides)}", err=True)


def _require_results(plan: Plan, outcomes: Outcomes, again: str) -> None:
    """Checks that all layouts have a result, and that one was measured.

    Raises:
        JobFailed: they have not.
    """
    if outcomes.missing:
        names = ", ".join(each.name for each in outcomes.missing)
        raise JobFailed(f"{tuning.end_of_log(plan)}\nnot measured: {names}; to measure them: {again}")
    if outcomes.fastest is None:
        raise JobFailed(f"no layout was measured; the logs of the trials are in {tuning.logs(plan)}")
