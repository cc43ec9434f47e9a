"""hpcgen checkpoint pin and unpin: protect checkpoints from removal by retention."""

from __future__ import annotations

from pathlib import Path

import click

from hpcgen.checkpoints.finding import find_exactly
from hpcgen.checkpoints.retention import pin, unpin
from hpcgen.cli.checkpoint.paths import paths_argument
from hpcgen.text import harmless


@click.command("pin")
@paths_argument
def _pin(paths: tuple[Path, ...]) -> None:
    """Neither the trainer nor hpcgen checkpoint prune removes a pinned checkpoint."""
    for checkpoint in [find_exactly(path) for path in paths]:
        pin(checkpoint)
        click.echo(harmless(f"pinned {checkpoint.path}"), err=True)


@click.command("unpin")
@paths_argument
def _unpin(paths: tuple[Path, ...]) -> None:
    for checkpoint in [find_exactly(path) for path in paths]:
        unpin(checkpoint)
        done = f"unpinned {checkpoint.path}" if checkpoint.is_pinned else f"{checkpoint.path} was not pinned"
        click.echo(harmless(done), err=True)


commands = {"pin": _pin, "unpin": _unpin}
