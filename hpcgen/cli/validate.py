"""hpcgen validate: everything that is wrong with a run, or what it would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hpcgen.cli.options import STAGES, run_options, warn


@click.command("validate")
@click.argument("stages", nargs=-1, type=click.Choice(STAGES))
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(stages: tuple[str, ...], config: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check a run file for STAGES (train when none is named) and print what they would do."""
    from hpcgen import api
    from hpcgen.planning.summary import summarize

    plan = api.plan(api.load_run(config, overrides), stages or ("train",))
    warn(plan.warnings)
    summary: dict[str, Any] = summarize(plan)
    if as_json:
        click.echo(json.dumps(summary, indent=1))
        return
    width = max(len(name) for name in summary)
    for name, value in summary.items():
        click.echo(f"{name:<{width}}  {value}")
