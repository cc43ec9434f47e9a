"""hpcgen ledger: show where the time of runs went."""

from __future__ import annotations

from pathlib import Path

import click

from hpcgen.cli.options import json_option
from hpcgen.cli.quantities import Deadline


@click.command("ledger")
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--since", type=Deadline(), metavar="DURATION", help="Only the last part of the time, such as 7d or 36h."
)
@json_option
def command(runs: tuple[Path, ...], since: float | None, as_json: bool) -> None:
    """RUN is a run directory, or a run file with the directory in paths.run_dir. Default: run.yaml, or this directory.

    Divides the time from the first submission to the end, or to now, into steps that count and what was lost to
    restarts, saves, evaluations, nodes and the queue. All parts add up to the time.
    """
    from hpcgen.cli.ledger_run import show_ledgers

    show_ledgers(runs, since, as_json=as_json)
