"""hpcgen checkpoint unpin: a pinned checkpoint is like the others again."""

from __future__ import annotations

from pathlib import Path

import click

from hpcgen.cli.checkpoint.paths import paths_argument


@click.command("unpin")
@paths_argument
def command(paths: tuple[Path, ...]) -> None:
    """Let retention have checkpoints PATH again."""
    from hpcgen.checkpoints.finding import find_exactly
    from hpcgen.checkpoints.retention import unpin

    for checkpoint in [find_exactly(path) for path in paths]:
        unpin(checkpoint)
        said = f"unpinned {checkpoint.path}" if checkpoint.is_pinned else f"{checkpoint.path} was not pinned"
        click.echo(said, err=True)
