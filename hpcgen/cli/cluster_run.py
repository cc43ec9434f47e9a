"""The job of `hpcgen cluster check --run`: submitted, waited for, and its figures shown and written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from hpcgen import api
from hpcgen.cli.job_wait import wait_for_job
from hpcgen.cli.options import warn
from hpcgen.config.document import read_text
from hpcgen.config.edits import with_value
from hpcgen.config.loader import load_cluster_run
from hpcgen.config.profiles import Profile
from hpcgen.errors import JobFailed
from hpcgen.files import make_directory, replace_text
from hpcgen.run_plan.plan import Plan
from hpcgen.slurm import cluster_check, sbatch
from hpcgen.slurm.cluster_check import STAGE, Measured
from hpcgen.text import counted
from trainer.contract.wording import binary_size, duration, few, rate_text


def run_job(
    name: str,
    file: Path,
    profile: Profile,
    nodes: int,
    partition: str | None,
    run_dir: str | None,
    overrides: tuple[str, ...],
    warned: tuple[str, ...],
    *,
    write: bool,
) -> None:
    """Submits the job of a valid profile, waits for it, and prints what it measured. With `write`, also writes the
    figures into the profile's file. `warned` are warnings that have been printed.

    Raises:
        HpcgenError: the job cannot be planned or submitted.
        JobFailed: it has no result, or the bandwidth is too low.
    """
    own = cluster_check.overrides(profile.node_type, nodes, partition)
    run = load_cluster_run(name, run_dir or f"runs/{file.stem}", [*own, *overrides])
    plan = api.plan(run, [STAGE])
    warn(tuple(warning for warning in plan.warnings if warning not in warned))
    script = api.render(plan, STAGE)
    make_directory(Path(plan.config.paths.run_dir), plan.config.share)
    job_id = sbatch.submit_script(plan, STAGE, script, cluster_check.ARGUMENTS)
    wait_for_job(job_id)
    measured = cluster_check.read_measured(plan, job_id)
    values = dict(cluster_check.new_values(measured, profile))
    _show(plan, profile, job_id, measured)
    if not measured.ok:
        log = Path(plan.config.paths.run_dir) / f"{STAGE}-{job_id}.log"
        raise JobFailed(f"the bandwidth is too low, or sums are wrong; {log} says more")
    if write:
        _write(file, values, f"measured on {counted(len(measured.nodes), 'node')}, job {job_id}, {_today()}")
    elif values:
        click.echo("to set these values, run it with --write", err=True)


def _show(plan: Plan, profile: Profile, job_id: str, measured: Measured) -> None:
    """Prints a table: what was measured, the figure, and what the profile says."""
    startup = "not measured" if measured.startup_s is None else duration(measured.startup_s)
    size = binary_size(measured.size_bytes)
    rows = [
        ("start-up", startup, f"{_of_profile(profile, 'startup_time_s')}, until the first step"),
        ("all-reduce", _rate(measured.bandwidth_gb_s), f"bus bandwidth, {size}, {measured.tool}"),
        ("run directory", _rate(measured.storage_gb_s), _of_profile(profile, "storage_write_gb_s")),
        ("scratch", _rate(measured.scratch_gb_s), f"the slowest node, {profile.config.scratch}"),
    ]
    click.echo(f"job {job_id} on {few(measured.nodes)}: {measured.software}")
    for row in rows:
        click.echo("{:<15}{:<14}{}".format(*row))
    if profile.config.nccl_baseline is None:
        baseline = Path(plan.config.paths.run_dir) / "nccl-baseline.json"
        click.echo(
            f"{baseline} has the bandwidths without a threshold. To compare every user's test with them, copy it to a "
            "directory that all users can read, and set nccl_baseline"
        )
    for missing in cluster_check.unmeasured(plan, measured.nodes):
        click.echo(f"not measured: {missing}")


def _rate(gb_s: float) -> str:
    return f"{rate_text(gb_s)} GB/s"


def _of_profile(profile: Profile, key: str) -> str:
    """The profile's value, with its place."""
    value = getattr(profile.config, key)
    return f"profile: {key} = {value} ({profile.document.origin(key) or 'default'})"


def _write(file: Path, values: dict[str, Any], note: str) -> None:
    text = read_text(file)
    for key, value in values.items():
        text = with_value(text, str(file), [key], value, note)
    if values:
        replace_text(file, text)
    written = ", ".join(f"{key} = {value}" for key, value in values.items())
    click.echo(f"wrote {file}: {written}" if values else f"{file} stays as it is", err=True)


def _today() -> str:
    return time.strftime("%Y-%m-%d")
