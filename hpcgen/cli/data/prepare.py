"""hpcgen data prepare: one task of the stage prepare."""

from __future__ import annotations

from typing import Any

import click

from hpcgen.cli.data.stage import run_stage, task_options, verify_option


@click.command("prepare")
@verify_option
@task_options
def command(**options: Any) -> None:
    """Make the .bin/.idx pairs straight from the compressed files, in one pass."""
    run_stage("prepare", **options)
