"""hpcgen checkpoint import: write a Hugging Face model as a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from hpcgen.cli.checkpoint.paths import complete_checkpoints, destination_option
from hpcgen.text import harmless


@click.command("import")
@click.argument("hf_dir", metavar="HF_DIR", type=click.Path(path_type=Path))
@destination_option
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    metavar="CHECKPOINT",
    help="For LoRA adapters of PEFT: the checkpoint of their base model.",
    shell_complete=complete_checkpoints,
)
@click.pass_context
def command(ctx: click.Context, hf_dir: Path, destination: Path, base: Path | None) -> None:
    """HF_DIR is a local directory with config.json and safetensors files, or with LoRA adapters of PEFT. DIR becomes a
    directory of checkpoints with weights only, for checkpoint.load with checkpoint.finetune: true, at any layout. Needs
    torch and safetensors, but no GPU.
    """
    from hpcgen.checkpoints.conversion import convert

    of_base = [] if base is None else ["--base", str(base)]
    arguments = ["import", str(hf_dir), "--to", str(destination), *of_base]
    ctx.exit(convert(arguments, lambda line: click.echo(harmless(line), err=True)))
