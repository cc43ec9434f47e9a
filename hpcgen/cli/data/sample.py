"""hpcgen data sample: write a small corpus from text available on every machine."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpcgen.data.sample import write_sample


@click.command("sample")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--max-mb",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MB",
    default=8.0,
    show_default=True,
    help="Maximum amount of text.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing file that differs.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(out: Path, max_mb: float, overwrite: bool, as_json: bool) -> None:
    """Its text is the source code of Python's standard library."""
    report = write_sample(out, max_mb=max_mb, overwrite=overwrite)
    click.echo(json.dumps(report.to_dict()) if as_json else str(report))
