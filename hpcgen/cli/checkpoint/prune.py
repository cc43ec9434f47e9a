"""hpcgen checkpoint prune: the checkpoints that the rules do not keep go."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.cli.checkpoint.paths import directory_argument
from hpcgen.text import size_text

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
@click.option(
    "--broken", is_flag=True, help="Remove those that the trainer set aside as broken, and no others."
)
@click.option("--dry-run", is_flag=True, help="Say what would go, and remove nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    directory: Path,
    keep_last: int | None,
    keep_every: int | None,
    broken: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove old checkpoints of DIR, a run's directory or one of checkpoints.

    Never removed: the newest whole one, pinned ones, those that are not complete, and Megatron-LM's.
    """
    from hpcgen.checkpoints.finding import find_directory
    from hpcgen.checkpoints.retention import remove

    if broken and (keep_last is not None or keep_every is not None):
        raise click.UsageError("--broken goes by no rule: leave out --keep-last and --keep-every")
    where = find_directory(directory)
    going, rule = _broken(where) if broken else _outdated(where, directory, keep_last, keep_every)
    click.echo(f"{where}: {rule}", err=True)
    verb = "would remove" if dry_run else "removed"
    for each in going:
        if not dry_run:
            remove(each.path)
        if not as_json:
            click.echo(f"{verb} {each.path} ({size_text(each.bytes)})")
    if as_json:
        entries = [dataclasses.asdict(each) | {"path": str(each.path)} for each in going]
        click.echo(json.dumps({"removed": not dry_run, "checkpoints": entries}, indent=1))
    plural = "checkpoint" if len(going) == 1 else "checkpoints"
    click.echo(f"{verb} {len(going)} {plural}, {size_text(sum(each.bytes for each in going))}", err=True)


@dataclasses.dataclass(frozen=True)
class _Going:
    """A checkpoint that is to be removed."""

    path: Path
    iteration: int
    bytes: int


def _broken(where: Path) -> tuple[list[_Going], str]:
    """Those that were set aside, and the rule in words."""
    from hpcgen.checkpoints.listing import list_set_aside

    going = [_Going(entry.path, entry.iteration, entry.bytes) for entry in list_set_aside(where)]
    return going, "those that were set aside as broken go"


def _outdated(
    where: Path, directory: Path, keep_last: int | None, keep_every: int | None
) -> tuple[list[_Going], str]:
    """Those that retention does not keep, oldest first, and the rules in words with where they come from."""
    from hpcgen.checkpoints.listing import size_of
    from hpcgen.checkpoints.retention import prunable

    retention = _retention(directory, keep_last, keep_every)
    going = [
        _Going(checkpoint.path, checkpoint.iteration, size_of(checkpoint))
        for checkpoint in prunable(where, retention)
    ]
    return going, f"{retention} ({_sources(retention, keep_last, keep_every)})"


def _sources(retention: Retention, keep_last: int | None, keep_every: int | None) -> str:
    """Where each of the rules comes from: the command line, or the run's configuration."""
    if keep_last is None and keep_every is None:
        return f"as {retention.source} says"
    sources = [
        f"checkpoint.keep_last of {retention.source}" if keep_last is None else f"--keep-last {keep_last}"
    ]
    if keep_every is not None:
        sources.append(f"--keep-every {keep_every}")
    elif retention.keep_every is not None:
        sources.append(f"checkpoint.keep_every of {retention.source}")
    return ", ".join(sources)


def _retention(directory: Path, keep_last: int | None, keep_every: int | None) -> Retention:
    """The run's own rules, under those that were given."""
    from hpcgen.checkpoints.retention import read_retention

    own = read_retention(directory)
    return dataclasses.replace(
        own,
        keep_last=own.keep_last if keep_last is None else keep_last,
        keep_every=(own.keep_every if keep_every is None else keep_every) or None,
    )
