"""hpcgen checkpoint prune: remove checkpoints that the retention rules do not keep."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.checkpoints.finding import find_directory
from hpcgen.checkpoints.listing import list_set_aside, size_of
from hpcgen.checkpoints.retention import prunable, read_retention, remove, require_named_by_user
from hpcgen.cli.checkpoint.paths import directory_argument
from hpcgen.cli.options import json_option
from hpcgen.text import counted, harmless, size_text

if TYPE_CHECKING:
    from hpcgen.checkpoints.retention import Retention


@click.command("prune")
@directory_argument
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep the newest N complete checkpoints.  [default: checkpoint.keep_last of the run]",
)
@click.option(
    "--keep-every",
    type=click.IntRange(min=0),
    metavar="M",
    help="Keep checkpoints whose iteration is a multiple of M; 0 disables this rule.  "
    "[default: checkpoint.keep_every of the run]",
)
@click.option(
    "--broken", is_flag=True, help="Remove only the checkpoints that the trainer set aside as broken."
)
@click.option("--dry-run", is_flag=True, help="List what would be removed without removing it.")
@json_option
def command(
    directory: Path,
    keep_last: int | None,
    keep_every: int | None,
    broken: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """DIR is a run directory or a directory of checkpoints. Never removed: the newest valid checkpoint, pinned and
    incomplete checkpoints, and Megatron-LM's.
    """
    if broken and (keep_last is not None or keep_every is not None):
        raise click.UsageError("--broken cannot be used with --keep-last or --keep-every")
    where = find_directory(directory)
    require_named_by_user(where, directory)
    removable, rule = _broken(where) if broken else _outdated(where, directory, keep_last, keep_every)
    click.echo(harmless(f"{where}: {rule}"), err=True)
    verb = "would remove" if dry_run else "removed"
    for each in removable:
        if not dry_run:
            remove(each.path)
        if not as_json:
            click.echo(harmless(f"{verb} {each.path} ({size_text(each.bytes)})"))
    if as_json:
        entries = [dataclasses.asdict(each) | {"path": str(each.path)} for each in removable]
        click.echo(json.dumps({"removed": not dry_run, "checkpoints": entries}, indent=1))
    size = size_text(sum(each.bytes for each in removable))
    click.echo(f"{verb} {counted(len(removable), 'checkpoint')}, {size}", err=True)


@dataclasses.dataclass(frozen=True)
class _Removable:
    """A checkpoint to remove."""

    path: Path
    iteration: int
    bytes: int


def _broken(where: Path) -> tuple[list[_Removable], str]:
    """The checkpoints set aside as broken, and the rule as text."""
    removable = [_Removable(entry.path, entry.iteration, entry.bytes) for entry in list_set_aside(where)]
    return removable, "removing only checkpoints set aside as broken"


def _outdated(
    where: Path, directory: Path, keep_last: int | None, keep_every: int | None
) -> tuple[list[_Removable], str]:
    """The checkpoints that retention does not keep, oldest first, and the rules with their sources as text."""
    retention = _retention(directory, keep_last, keep_every)
    removable = [
        _Removable(checkpoint.path, checkpoint.iteration, size_of(checkpoint))
        for checkpoint in prunable(where, retention)
    ]
    return removable, f"{retention} ({_sources(retention, keep_last, keep_every)})"


def _sources(retention: Retention, keep_last: int | None, keep_every: int | None) -> str:
    """The source of each rule: the command line, or the run's configuration."""
    if keep_last is None and keep_every is None:
        return f"from {retention.source}"
    sources = [
        f"checkpoint.keep_last of {retention.source}" if keep_last is None else f"--keep-last {keep_last}"
    ]
    if keep_every is not None:
        sources.append(f"--keep-every {keep_every}")
    elif retention.keep_every is not None:
        sources.append(f"checkpoint.keep_every of {retention.source}")
    return ", ".join(sources)


def _retention(directory: Path, keep_last: int | None, keep_every: int | None) -> Retention:
    """The run's own rules, overridden by the options."""
    own = read_retention(directory)
    return dataclasses.replace(
        own,
        keep_last=own.keep_last if keep_last is None else keep_last,
        keep_every=(own.keep_every if keep_every is None else keep_every) or None,
    )
