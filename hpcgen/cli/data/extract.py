"""hpcgen data extract: one task of the stage extract."""

from __future__ import annotations

from typing import Any

import click

from hpcgen.cli.data.stage import run_stage, task_options


@click.command("extract")
@task_options
def command(**options: Any) -> None:
    """Uncompress the files of the corpus."""
    run_stage("extract", **options)
