"""The difference that `hpcgen cluster upgrade` shows, and the files that it writes."""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import click

from hpcgen.api import site_directories
from hpcgen.config.directories import site_of, with_templates_of
from hpcgen.config.document import read_text
from hpcgen.config.upgrade import upgraded
from hpcgen.errors import HpcgenError
from hpcgen.files import replace_text, require_writable, write_text
from hpcgen.text import harmless

LOADS_MODULES = re.compile(r"\s*(?:module|ml) (?:load|add) ([\w./+ -]+)")
COLORS = {"+": "green", "-": "red", "@": "cyan"}


def upgrade_file(file: Path, *, write: bool) -> None:
    """Prints how the file changes, and with `write` replaces it.

    Raises:
        HpcgenError: the file cannot be upgraded or written, or an earlier FILE.orig exists.
    """
    before = read_text(file)
    upgrade = upgraded(file)
    if upgrade.text == before:
        click.echo(f"{file} is in today's form", err=True)
    for line in _difference(file, before, upgrade.text):
        color = COLORS.get(line[:1])
        click.secho(harmless(line, keep="\t"), fg=color, bold=line[:3] in ("+++", "---"))
    for remark in (*upgrade.remarks, *(() if upgrade.is_node_type else _loaded_modules(file))):
        click.echo(remark, err=True)
    if upgrade.text == before:
        return
    if not write:
        click.echo("to write it, run it with --write", err=True)
        return
    require_writable(file)
    original = file.with_name(f"{file.name}.orig")
    if original.exists() or original.is_symlink():
        raise HpcgenError("exists and may be the only copy of an older file", "move it away", where=original)
    write_text(original, before, stat.S_IMODE(file.stat().st_mode))
    replace_text(file, upgrade.text)
    click.echo(f"wrote {file}; the old file is {original}", err=True)


def _difference(file: Path, before: str, after: str) -> list[str]:
    name = str(file)
    return list(difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, lineterm=""))


def _loaded_modules(file: Path) -> Iterator[str]:
    """Yields a remark for each line of the site's templates that loads a module."""
    for directory in with_templates_of(site_of(file), site_directories()):
        for template in sorted(directory.glob("slurm/*.j2")):
            for number, line in enumerate(template.read_text(errors="replace").splitlines(), 1):
                if found := LOADS_MODULES.match(line):
                    modules = ", ".join(found[1].split())
                    yield f"{template}:{number}: modules: [{modules}] in the profile loads it in every job"
