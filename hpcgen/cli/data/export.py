"""hpcgen data export: write pairs as Parquet or Arrow files for programs that read Hugging Face datasets."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import click

from hpcgen.cli.data.progress import shown
from hpcgen.cli.options import run_file_option
from hpcgen.errors import JobFailed
from hpcgen.files import shared_as
from hpcgen.slurm.processes import term_exits


@click.command("export")
@click.argument("prefixes", metavar="[PREFIX]...", nargs=-1, type=click.Path(path_type=Path))
@run_file_option(
    "Run file of the pairs; without PREFIX, all its pairs are exported.  [default without PREFIX: run.yaml]"
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="New directory, or the directory of an interrupted export to continue.",
)
@click.option(
    "--format",
    type=click.Choice(["parquet", "arrow"]),
    default="parquet",
    show_default=True,
    help="parquet for datasets.load_dataset, arrow for datasets.load_from_disk.",
)
@click.option(
    "--sequence-length",
    type=click.IntRange(min=1),
    metavar="N",
    help="Rows of N tokens that continue across documents.  [default: one row per document]",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of pairs exported in parallel.  [default: one per core]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    prefixes: tuple[Path, ...],
    config: Path | None,
    overrides: tuple[str, ...],
    output: Path,
    format: Literal["parquet", "arrow"],
    sequence_length: int | None,
    workers: int | None,
    as_json: bool,
) -> None:
    """The token IDs are in the column input_ids. Each pair becomes one file. Every byte is read and compared with the
    SHA-256 in the record of the pair. The same command continues an export that was interrupted.

    \b
    hpcgen data export -c run.yaml --output tokens-2048 --sequence-length 2048
    hpcgen data export tokens/train-* --output documents
    """
    import pyarrow  # noqa: F401  # first, because its extra also brings what the others need

    from hpcgen.data.export import export_pairs, plan_export
    from hpcgen.run_plan import pairs

    run = pairs.read_named(prefixes, config, overrides)
    shards = plan_export(pairs.records_to_export(prefixes, run), output, format, sequence_length)
    access = shared_as(run.job.share) if run is not None and run.job is not None else nullcontext()
    with access, term_exits(), shown() as on_progress:
        report = export_pairs(shards, workers=workers, on_progress=on_progress)
    click.echo(json.dumps(report.to_dict()) if as_json else str(report))
    if report.errors:
        raise JobFailed("\n".join(report.errors))
