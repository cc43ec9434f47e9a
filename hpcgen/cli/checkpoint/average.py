"""hpcgen checkpoint average: write the mean of the last checkpoints of a run, or the moving average of its weights."""

from __future__ import annotations

from pathlib import Path

import click

from hpcgen.cli.checkpoint.paths import complete_checkpoints, destination_option
from hpcgen.text import harmless


@click.command("average")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path), shell_complete=complete_checkpoints)
@click.option(
    "--last",
    type=click.IntRange(min=2),
    metavar="N",
    help="Write the mean of the newest N complete checkpoints.",
)
@click.option(
    "--ema",
    is_flag=True,
    help="Write the moving average (training.ema_decay) in the newest complete checkpoint.",
)
@destination_option
@click.pass_context
def command(ctx: click.Context, run: Path, last: int | None, ema: bool, destination: Path) -> None:
    """RUN is the directory of a run or of checkpoints of the trainer. DIR becomes a directory of checkpoints with the
    mean of the weights of the last N, or their moving average, for generate, evaluate, checkpoint export, and
    checkpoint.load with checkpoint.finetune: true. Needs torch and safetensors, but no GPU.
    """
    from hpcgen.checkpoints.conversion import convert

    if (last is None) is not ema:
        raise click.UsageError("use either --last N or --ema")
    which = ["--ema"] if ema else ["--last", str(last)]
    arguments = ["average", str(run), *which, "--to", str(destination)]
    ctx.exit(convert(arguments, lambda line: click.echo(harmless(line), err=True)))
