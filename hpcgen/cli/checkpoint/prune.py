"""hpcgen checkpoint prune: the checkpoints that the rules do not keep go."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.cli.checkpoint.paths import directory_argument

if TYPE_CHECKING:
    from hpcgen.checkpoints.retention import Retention


@click.command("prune")
@directory_argument
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep the newest N complete ones.  [default: checkpoint.keep_last of the run]",
)
@click.option(
    "--keep-every",
    type=click.IntRange(min=0),
    metavar="M",
    help="Keep those of iterations that are a multiple of M; 0 keeps none so.  "
    "[default: checkpoint.keep_every of the run]",
)
@click.option("--dry-run", is_flag=True, help="Say what would go, and remove nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    directory: Path, keep_last: int | None, keep_every: int | None, dry_run: bool, as_json: bool
) -> None:
    """Remove old checkpoints of DIR, a run's directory or one of checkpoints.

    Never removed: the newest whole one, pinned ones, those that are not complete, and Megatron-LM's.
    """
    from hpcgen.checkpoints.finding import find_directory
    from hpcgen.checkpoints.listing import size_of
    from hpcgen.checkpoints.retention import prunable, remove
    from hpcgen.report.words import size

    where = find_directory(directory)
    retention = _retention(directory, keep_last, keep_every)
    going = prunable(where, retention)
    sizes = [size_of(checkpoint) for checkpoint in going]
    verb = "would remove" if dry_run else "removed"
    for checkpoint, num_bytes in zip(going, sizes, strict=True):
        if not dry_run:
            remove(checkpoint)
        if not as_json:
            click.echo(f"{verb} {checkpoint.path} ({size(num_bytes)})")
    if as_json:
        entries = [
            {"path": str(checkpoint.path), "iteration": checkpoint.iteration, "bytes": num_bytes}
            for checkpoint, num_bytes in zip(going, sizes, strict=True)
        ]
        click.echo(json.dumps({"removed": not dry_run, "checkpoints": entries}, indent=1))
    plural = "checkpoint" if len(going) == 1 else "checkpoints"
    click.echo(f"{verb} {len(going)} {plural}, {size(sum(sizes))}; {retention}", err=True)


def _retention(directory: Path, keep_last: int | None, keep_every: int | None) -> Retention:
    """The run's own rules, under those that were given."""
    from hpcgen.checkpoints.retention import read_retention

    own = read_retention(directory)
    return dataclasses.replace(
        own,
        keep_last=own.keep_last if keep_last is None else keep_last,
        keep_every=(own.keep_every if keep_every is None else keep_every) or None,
    )
