"""hpcgen checkpoint list: list the checkpoints of a run with their state and the rule that keeps them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcgen.checkpoints.finding import find_directory
from hpcgen.checkpoints.listing import list_entries
from hpcgen.checkpoints.retention import read_retention
from hpcgen.cli.checkpoint.paths import directory_argument
from hpcgen.cli.options import json_option
from hpcgen.report.words import moment
from hpcgen.text import harmless, padded, size_text

if TYPE_CHECKING:
    from hpcgen.checkpoints.listing import Entry

COLORS = {"complete": "green", "damaged": "red", "incomplete": "yellow", "set aside": "yellow"}


@click.command("list")
@directory_argument
@json_option
def command(directory: Path, as_json: bool) -> None:
    """DIR is a run directory or a directory of checkpoints. Only the names and sizes of files are checked; to check
    their contents, use hpcgen checkpoint inspect --verify.
    """
    where = find_directory(directory)
    shown = harmless(str(where))
    retention = read_retention(directory)
    entries = list_entries(where, retention)
    if as_json:
        click.echo(json.dumps([_entry_json(entry) for entry in entries], indent=1))
        return
    if not entries:
        click.echo(f"{shown}: no checkpoints yet", err=True)
        return
    _print_entries(entries)
    newest = next((entry.path for entry in entries if entry.state in ("complete", "Megatron-LM's")), None)
    if newest is not None:
        click.echo(
            harmless(
                f"to start a run from {newest.name}: checkpoint.load: {os.path.normpath(newest.absolute())}"
            ),
            err=True,
        )
    click.echo(f"{shown}: {size_text(sum(entry.bytes for entry in entries))}; {retention}", err=True)


def _entry_json(entry: Entry) -> dict[str, Any]:
    return dataclasses.asdict(entry) | {"path": str(entry.path)}


def _print_entries(entries: Sequence[Entry]) -> None:
    evaluates = any(entry.evaluation for entry in entries)
    titles = (
        "checkpoint",
        "iteration",
        "complete since",
        "size",
        "state",
        "kept by",
        *_if(evaluates, "evaluation"),
    )
    rows = [
        (
            entry.path.name,
            f"{entry.iteration:,}",
            moment(entry.time),
            size_text(entry.bytes),
            entry.state,
            _kept_by(entry),
            *_if(evaluates, entry.evaluation or ""),
        )
        for entry in entries
    ]
    heading, *lines = padded((titles, *rows), right=(1, 3))
    click.secho("  ".join(heading).rstrip(), bold=True)
    for entry, cells in zip(entries, lines, strict=True):
        cells[4] = click.style(cells[4], fg=COLORS.get(entry.state))
        click.echo("  ".join(cells).rstrip())
        if entry.problem is not None:
            click.echo(f"    {harmless(entry.problem)}")


def _if(condition: bool, cell: str) -> tuple[str, ...]:
    return (cell,) if condition else ()


def _kept_by(entry: Entry) -> str:
    if entry.kept_by is None:
        return "nothing (prune removes it)"
    return {"keep_last is null": "all are kept"}.get(entry.kept_by, entry.kept_by)
