"""hpcgen checkpoint pin: a checkpoint that nothing removes by itself."""

from __future__ import annotations

from pathlib import Path

import click

from hpcgen.cli.checkpoint.paths import paths_argument


@click.command("pin")
@paths_argument
def command(paths: tuple[Path, ...]) -> None:
    """Keep checkpoints PATH for good: neither the trainer nor prune removes them."""
    from hpcgen.checkpoints.finding import find_exactly
    from hpcgen.checkpoints.retention import pin

    for checkpoint in [find_exactly(path) for path in paths]:
        pin(checkpoint)
        click.echo(f"pinned {checkpoint.path}", err=True)
