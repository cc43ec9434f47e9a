"""Lists of the available cluster profiles and node types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import click

from hpcgen.errors import HpcgenError


def list_found(
    names: Iterable[str],
    find: Callable[[str], Path | None],
    describe: Callable[[str], Mapping[str, str | None]],
    check: str,
    as_json: bool,
) -> None:
    """Prints each name with its description, its file and the other texts of `describe`.

    An invalid file is described by the command that checks it.
    """

    def described(name: str) -> Mapping[str, str | None]:
        try:
            return describe(name)
        except HpcgenError:
            return {"description": f"invalid; run {check} {name}"}

    rows = [{"name": name, "file": str(find(name)), **described(name)} for name in names]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    width = max(len(row["name"] or "") for row in rows)
    for row in rows:
        name, description = row.pop("name"), row.pop("description")
        click.echo(f"{name:<{width}}  {description}")
        for text in filter(None, row.values()):
            click.echo(f"{'':<{width}}  " + click.style(text, dim=True))
