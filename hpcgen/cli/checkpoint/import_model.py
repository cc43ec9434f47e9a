"""hpcgen checkpoint import: write a Hugging Face model as a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from hpcgen.text import harmless


@click.command("import")
@click.argument("hf_dir", metavar="HF_DIR", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "destination",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="New directory.",
)
@click.pass_context
def command(ctx: click.Context, hf_dir: Path, destination: Path) -> None:
    """HF_DIR is a local directory with config.json and safetensors files. DIR becomes a directory of checkpoints with
    weights only, for checkpoint.load with checkpoint.finetune: true, at any layout. Needs torch and safetensors, but no
    GPU.
    """
    from hpcgen.checkpoints.conversion import convert

    arguments = ["import", str(hf_dir), "--to", str(destination)]
    ctx.exit(convert(arguments, lambda line: click.echo(harmless(line), err=True)))
