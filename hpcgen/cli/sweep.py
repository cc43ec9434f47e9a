"""hpcgen sweep: several trainings that differ in some values of one run file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from hpcgen.cli.options import json_option, run_options, templates_option

if TYPE_CHECKING:
    from hpcgen.sweeps.comparison import Metric

WIDTH = 80
"""Width of tables in pipes."""


@click.command("sweep")
@run_options
@click.option(
    "--zip", "paired", is_flag=True, help="Pair the values of all keys in place of all combinations."
)
@click.option(
    "--points",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read the points from a file: one per line, as assignments for --set.",
)
@click.option(
    "--max-running",
    type=click.IntRange(min=1),
    metavar="N",
    help="Run at most N points at once. The others wait in the queue.",
)
@click.option(
    "--launcher",
    type=click.Choice(["slurm", "local"]),
    default="slurm",
    show_default=True,
    help="slurm queues a job for each point; local runs one after another on this machine.",
)
@click.option("--retry", is_flag=True, help="Also repeat points that failed and would fail again.")
@click.option("--dry-run", is_flag=True, help="Plan and check all points without submitting.")
@click.option(
    "--results",
    is_flag=True,
    help="Compare the losses so far. Without values or points, compares all earlier points.",
)
@click.option(
    "--metric",
    type=click.Choice(["valid", "train"]),
    help="With --results: compare validation or training losses.  [default: valid if every point has one]",
)
@templates_option
@json_option
def command(
    config: Path,
    overrides: tuple[str, ...],
    paired: bool,
    file: Path | None,
    max_running: int | None,
    launcher: Literal["slurm", "local"],
    retry: bool,
    dry_run: bool,
    results: bool,
    metric: Metric | None,
    templates: tuple[Path, ...],
    as_json: bool,
) -> None:
    """For example: hpcgen sweep -c run.yaml --set optimizer.lr=1e-4,3e-4,1e-3 --set training.seed=1,2

    Each combination of values is a point: a run with a directory of its own in RUN_DIR/sweep. All points are checked
    before the first is submitted. The same command again continues those that stopped, and starts those that are
    missing. Commas in brackets and quotes belong to a value.
    """
    from hpcgen.cli.sweep_run import run_sweep

    run_sweep(
        config,
        overrides,
        file,
        launcher,
        metric,
        templates,
        paired=paired,
        max_running=max_running,
        retry=retry,
        dry_run=dry_run,
        results=results,
        as_json=as_json,
    )
