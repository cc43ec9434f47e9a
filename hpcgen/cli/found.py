"""Lists of the available cluster profiles and node types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from hpcgen.errors import HpcgenError


def list_found(
    names: Iterable[str],
    find: Callable[[str], Path | None],
    describe: Callable[[str], str],
    check: str,
    as_json: bool,
) -> None:
    """Prints each name with its description and file. An invalid file is described by the command that checks it."""

    def description(name: str) -> str:
        try:
            return describe(name)
        except HpcgenError:
            return f"invalid; run {check} {name}"

    rows = [{"name": name, "file": str(find(name)), "description": description(name)} for name in names]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        click.echo(f"{row['name']:<{width}}  {row['description']}")
        click.echo(f"{'':<{width}}  " + click.style(row["file"], dim=True))
