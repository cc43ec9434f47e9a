"""Prints the checks of `hpcgen doctor -c`: of this login node and the site, and of compute nodes by a job."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click

from hpcgen import api
from hpcgen.cli.job_wait import wait_for_job
from hpcgen.cli.paragraph import print_paragraph
from hpcgen.config.loader import Run
from hpcgen.doctor import nodes as node_health
from hpcgen.doctor import site
from hpcgen.doctor.check import Check, any_failed
from hpcgen.files import make_directory
from hpcgen.redaction import redact_json
from hpcgen.run_plan.plan import Plan, main_stage
from hpcgen.runs.attempts import read_job
from hpcgen.slurm import sbatch
from hpcgen.slurm.cluster_check import RESULT_DELAY_S, end_of
from hpcgen.slurm.job_files import NODE_REPORTS, job_directory
from hpcgen.slurm.programs import ask_node_names

COLORS = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "cyan"}
Load = Callable[[tuple[str, ...]], Run]
"""Loads the run with more overrides."""


def check_site(load: Load, nodes: str | None, *, prints: bool, as_json: bool) -> int:
    """Checks this login node and the site, and with `nodes` also compute nodes by a job. Returns the exit status.

    `nodes` is a number of nodes or a list of their names. With `prints`, only prints the script of their job.

    Raises:
        HpcgenError: the run is invalid, `nodes` is not a list of nodes, or the job cannot be submitted.
    """
    run = load(())
    has_stage = any(run.document.get(section) is not None for section in ("model", "program", "data"))
    stage = main_stage(run) if has_stage else "node-health"
    checks = iter(()) if prints else site.checks(run, stage, api.render)
    if nodes is not None:
        health = _plan_of_nodes(load, api.plan(run, [stage]), nodes)
        if prints:
            click.echo(api.render(health, "node-health"), nl=False)
            return 0
        checks = itertools.chain(checks, _check_nodes(health))
    shown = list(checks) if as_json else _show_checks(checks)
    if as_json:
        found = {"checks": [dataclasses.asdict(check) for check in shown]}
        click.echo(json.dumps(redact_json(found), indent=1))
    return int(any_failed(shown))


def _show_checks(checks: Iterable[Check]) -> list[Check]:
    """Prints each check when it is done, since some programs take seconds to answer."""
    shown = []
    for check in checks:
        shown.append(check)
        print_paragraph(f"{check.state:<8} ", f"{check.name}: {check.found}", COLORS[check.state])
        if check.fix and check.state != "ok":
            print_paragraph("         fix: ", check.fix)
    states = [check.state for check in shown]
    counts = [f"{states.count(state)} {state}" for state in ("ok", "warning", "failed", "skipped")]
    click.echo(", ".join(counts))
    return shown


def _plan_of_nodes(load: Load, plan: Plan, asked: str) -> Plan:
    """The plan of the job that checks the nodes: a number of them, or a list of names.

    Raises:
        HpcgenError: the job cannot be planned, or the list of nodes is not one.
    """
    health = api.plan(load(tuple(node_health.overrides(asked, plan))), [node_health.STAGE])
    return node_health.with_paths(health, plan)


def _check_nodes(health: Plan) -> Iterator[Check]:
    """Submits the job, waits for it, and yields what it found.

    Raises:
        HpcgenError: the job cannot be submitted.
    """
    run_dir = Path(health.config.paths.run_dir)
    make_directory(run_dir, health.config.share)
    job = sbatch.submit_script(health, node_health.STAGE, api.render(health, node_health.STAGE))
    wait_for_job(job)
    reports = job_directory(run_dir, job) / f"{NODE_REPORTS}0"
    deadline = time.monotonic() + RESULT_DELAY_S
    while not reports.exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    log = run_dir / f"{node_health.STAGE}-{job}.log"
    attempts = read_job(job_directory(run_dir, job))
    names = ask_node_names(attempts[-1].nodes)[0] if attempts else []
    if not names or not reports.exists():
        click.echo(end_of(log), err=True)
        yield Check("job", "failed", f"job {job} checked no node", f"Read its log: {log}.")
        return
    yield from node_health.checks(reports, names)
