"""hpcgen status: show what runs do, and why they ended."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.cli.options import json_option
from hpcgen.cli.run_argument import run_directories
from hpcgen.cli.status_rows import print_rows, rows
from hpcgen.errors import HpcgenError
from hpcgen.redaction import redact_json

if TYPE_CHECKING:
    from hpcgen.runs.status import RunStatus

WIDTH = 80
"""Width of the text in a pipe, and at least in a terminal."""


@click.command("status")
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--watch", is_flag=True, help="Show the status until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.5),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="With --watch: time between two looks at the files. Slurm is asked every 30 s.",
)
@json_option
def command(runs: tuple[Path, ...], watch: bool, interval: float, as_json: bool) -> None:
    """RUN is a run directory or a run file. Default: the run of ./run.yaml, or else the current directory.

    Shows state, progress, expected end, checkpoints, jobs, and why each attempt ended. Reads the run's files, and asks
    Slurm once for the jobs of all runs. If Slurm does not answer, shows what the files say.
    """
    if watch and as_json:
        raise HpcgenError("--watch excludes --json", "run hpcgen status --json again for each look")
    directories = run_directories(runs)
    planned = set(directories) - set(runs)  # those that run files name
    if watch:
        from hpcgen.cli.watching import watch_runs

        watch_runs(directories, interval, planned)
        return
    from hpcgen.runs.look import look

    now = time.time()
    found = look(directories, now, planned)
    if as_json:
        click.echo(json.dumps([redact_json(dataclasses.asdict(status)) for status in found], indent=1))
        return
    _print(found, now)


def _print(found: Sequence[RunStatus], now: float) -> None:
    width = max(WIDTH, shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH)
    for number, status in enumerate(found):
        if number:
            click.echo()
        print_rows(rows(status, now), width)
