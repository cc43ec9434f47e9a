"""hpcgen data concat: one task of the stage concat."""

from __future__ import annotations

from typing import Any

import click

from hpcgen.cli.data.stage import run_stage, task_options


@click.command("concat")
@task_options
def command(**options: Any) -> None:
    """Join the extracted files into exactly num_output_files files."""
    run_stage("concat", **options)
