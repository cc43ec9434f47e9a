"""hpcgen doctor: name what is wrong with a run, or check whether a cluster has what a run needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.cli.options import json_option, read_run_or_cluster, run_or_cluster_options
from hpcgen.cli.run_argument import run_directory
from hpcgen.errors import HpcgenError

if TYPE_CHECKING:
    from hpcgen.config.loader import Run


@click.command("doctor")
@click.argument("run", metavar="[RUN]", required=False, type=click.Path(path_type=Path))
@run_or_cluster_options
@click.option(
    "--nodes",
    metavar="N|LIST",
    help="Also check compute nodes by a job: a number of nodes, or a list such as ndv5-[1-4].",
)
@click.option(
    "--print", "prints", is_flag=True, help="With --nodes: print the script of the job, and do nothing else."
)
@json_option
def command(
    run: Path | None,
    config: Path | None,
    cluster: str | None,
    run_dir: str | None,
    overrides: tuple[str, ...],
    nodes: str | None,
    prints: bool,
    as_json: bool,
) -> int:
    """RUN is a run directory, or a run file with the directory in paths.run_dir. Without it, checks what a run needs.

    With RUN, reads what the run left: markers, events, logs, metrics, checkpoints. Names each cause with its evidence,
    what to do and the page that explains it, the most likely cause first. Exits with status 1 if something stopped the
    run, would stop it, or slows it.

    With -c or --cluster, checks on this login node what the run needs: settings of Slurm, the partition, the container
    runtime and versions known to fail, the image, paths, disk space, tokenizer and secrets. Exits with status 1 if a
    check fails. With --nodes, the stage node-health then checks nodes: devices, GPUs, memlock, paths, scratch, a task
    in the container, and whether versions and clocks are the same on all of them. Ctrl-C cancels the job.
    """
    if prints and nodes is None:
        raise HpcgenError("--print: only with --nodes", "add --nodes 2, whose script it prints")
    given = config is not None or cluster is not None or overrides or run_dir is not None or nodes is not None
    if run is None:

        def load(more: tuple[str, ...] = ()) -> Run:
            return read_run_or_cluster(config, cluster, run_dir, (*overrides, *more))

        from hpcgen.cli.doctor_site import check_site

        return check_site(load, nodes, prints=prints, as_json=as_json)
    if given:
        reason = "RUN excludes -c, --cluster, --run-dir, --set and --nodes"
        raise HpcgenError(reason, f"use hpcgen doctor {run} for what happened, or -c for what the run needs")
    from hpcgen.cli.doctor_run import diagnose_run

    return diagnose_run(run_directory(run), as_json=as_json)
