"""The job of `hpcgen doctor --nodes`: rendered, submitted, waited for, and its reports read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from hpcgen import api
from hpcgen.cli.job_wait import wait_for_job
from hpcgen.config.loader import Run
from hpcgen.doctor import nodes
from hpcgen.doctor.check import Check
from hpcgen.files import make_directory
from hpcgen.run_plan.plan import Plan
from hpcgen.runs.attempts import read_job
from hpcgen.slurm import sbatch
from hpcgen.slurm.cluster_check import RESULT_DELAY_S, end_of
from hpcgen.slurm.job_files import NODE_REPORTS, job_directory
from hpcgen.slurm.programs import ask_node_names

Load = Callable[[tuple[str, ...]], Run]
"""Loads the run with more overrides."""


def plan_of_nodes(load: Load, plan: Plan, asked: str) -> Plan:
    """The plan of the job that checks the nodes: a number of them, or a list of names.

    Raises:
        HpcgenError: the job cannot be planned, or the list of nodes is not one.
    """
    health = api.plan(load(tuple(nodes.overrides(asked, plan))), [nodes.STAGE])
    return nodes.with_paths(health, plan)


def check_nodes(health: Plan) -> Iterator[Check]:
    """Submits the job, waits for it, and yields what it found.

    Raises:
        HpcgenError: the job cannot be submitted.
    """
    run_dir = Path(health.config.paths.run_dir)
    make_directory(run_dir, health.config.share)
    job = sbatch.submit_script(health, nodes.STAGE, api.render(health, nodes.STAGE))
    wait_for_job(job)
    reports = job_directory(run_dir, job) / f"{NODE_REPORTS}0"
    deadline = time.monotonic() + RESULT_DELAY_S
    while not reports.exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    log = run_dir / f"{nodes.STAGE}-{job}.log"
    attempts = read_job(job_directory(run_dir, job))
    names = ask_node_names(attempts[-1].nodes)[0] if attempts else []
    if not names or not reports.exists():
        click.echo(end_of(log), err=True)
        yield Check("job", "failed", f"job {job} checked no node", f"Read its log: {log}.")
        return
    yield from nodes.checks(reports, names)
