"""hpcgen logs: show the root failure of a run and the lines of its ranks."""

from __future__ import annotations

from pathlib import Path

import click

from hpcgen.cli.options import StageChoice, json_option


@click.command("logs")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--stage", type=StageChoice(), metavar="STAGE", help="Stage. Default: that of the newest attempt."
)
@click.option(
    "--task", type=click.IntRange(min=0), metavar="N", help="Task of an array. Default: the newest."
)
@click.option(
    "--attempt",
    "number",
    type=int,
    metavar="N",
    help="Attempt, from 1 for the oldest of the stage, or from -1 for the newest. Default: -1.",
)
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Show only the lines of this rank.")
@click.option(
    "-n",
    "--lines",
    "count",
    type=click.IntRange(min=0),
    default=30,
    show_default=True,
    help="Number of lines.",
)
@click.option("-f", "--follow", is_flag=True, help="Show new lines until the run is over or Ctrl-C.")
@json_option
def command(
    run: Path,
    stage: str | None,
    task: int | None,
    number: int | None,
    rank: int | None,
    count: int,
    follow: bool,
    as_json: bool,
) -> None:
    """RUN is a run directory, or a run file with the directory in paths.run_dir.

    Shows why an attempt failed: the rank that failed first, its node and its traceback, and in short what followed from
    it. The last lines of all ranks follow, in time order. With --follow and --json, each line is a JSON object.
    """
    from hpcgen.cli.logs_run import show_logs

    show_logs(run, stage, task, number, rank, count, follow=follow, as_json=as_json)
