"""hpcgen data download: one task of the stage download."""

from __future__ import annotations

from typing import Any

import click

from hpcgen.cli.data.stage import run_stage, task_options


@click.command("download")
@task_options
def command(**options: Any) -> None:
    """Fetch the files of the corpus that are not there yet."""
    run_stage("download", **options)
