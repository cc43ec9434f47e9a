"""Lists, overrides and compares the templates of job scripts for `hpcgen templates`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpcgen import api
from hpcgen.cli.terminal import new_table, print_table
from hpcgen.config.directories import configuration_directories
from hpcgen.config.profiles import cluster_names, load_cluster
from hpcgen.config.trust import require_safe_parents, require_trusted
from hpcgen.errors import FilePlace, HpcgenError
from hpcgen.files import write_text
from hpcgen.slurm.rendering import inventory
from hpcgen.slurm.rendering.block_docs import block_docs
from hpcgen.slurm.rendering.environment import ShellEnvironment, make_environment
from hpcgen.slurm.rendering.inventory import TemplateFile
from hpcgen.slurm.rendering.override import override_text
from hpcgen.slurm.rendering.replaced import Replaced, replaced_functions, shipped_functions, with_records
from hpcgen.text import did_you_mean


def list_templates(templates: Sequence[Path], *, as_json: bool) -> None:
    """Prints the template of each stage and what the site replaces in it.

    `templates` are directories of site templates.

    Raises:
        HpcgenError: a template is missing, unreadable or invalid.
    """
    environment = _environment(templates)
    chains = {name: inventory.template_chain(environment, name) for name in inventory.TEMPLATES}
    functions = {name: replaced_functions(environment, name) for name in inventory.TEMPLATES}
    unused = inventory.unused_files(environment)
    if as_json:
        listed = [
            {
                "name": name,
                "files": [_file(file) for file in chain],
                "functions": [_function(function) for function in functions[name]],
            }
            for name, chain in chains.items()
        ]
        left = [{"path": str(one.path), "reason": one.reason} for one in unused]
        click.echo(json.dumps({"templates": listed, "unused": left}, indent=1))
        return
    _print_table([_row(name, chain, functions[name]) for name, chain in chains.items()])
    for one in unused:
        click.secho(f"not used: {one.path}; {one.reason}", fg="yellow")


def override_template(name: str, blocks: Sequence[str], output: Path | None) -> None:
    """Writes a template for stage `name` to edit. `blocks` are those to replace. Default: all, as comments.

    `output` is a directory of templates. Default: the user's own.

    Raises:
        HpcgenError: a block is unknown, or the file exists or cannot be written.
    """
    known = inventory.shipped_blocks(name)
    for block in blocks:
        if block not in known:
            raise HpcgenError(f"template {name} has no block {block!r}", _instead(block, known))
    configured = configuration_directories("templates")
    directory = output or configured[0]
    target = directory / inventory.template_file(name)
    if target.is_symlink() or target.exists():
        raise HpcgenError(f"{target} already exists", "edit it, or remove it first")
    _make_directory(target.parent)
    write_text(target, override_text(name, known, block_docs(), blocks), mode=0o644)
    click.echo(target)
    option = "" if directory in configured else f" --templates {shlex.quote(str(directory))}"
    click.echo(f"next: edit it, then run hpcgen templates check{option}", err=True)


def show_differences(name: str, templates: Sequence[Path], *, accept: bool) -> None:
    """Prints how the site's functions in template `name` differ from the shipped ones.

    With `accept`, records them as up to date.

    Raises:
        HpcgenError: a template is missing, unreadable or invalid.
    """
    replaced = replaced_functions(_environment(templates), name)
    for function in replaced:
        for diff in function.diffs():
            click.echo(diff)
    if not replaced:
        click.echo(f"the site replaces no function of template {name}", err=True)
    elif accept:
        path = replaced[0].path
        text = with_records(path.read_text(encoding="utf-8"), shipped_functions(name))
        write_text(path, text, mode=path.stat().st_mode & 0o777)
        click.echo(f"recorded in {path}", err=True)


def _environment(templates: Sequence[Path]) -> ShellEnvironment:
    """The templates from which jobs are rendered."""
    return make_environment(api.site_directories(templates), _trusted_groups())


def _trusted_groups() -> set[str]:
    """Groups trusted by any profile. These commands only read and write templates and never run them."""
    trusted: set[str] = set()
    for name in cluster_names():
        try:
            trusted.update(load_cluster(name)[0].trusted_groups)
        except HpcgenError:
            continue  # `hpcgen templates check` reports its mistakes
    return trusted


def _file(file: TemplateFile) -> dict[str, Any]:
    return {
        "template": file.name,
        "path": str(file.path),
        "directory": str(file.directory),
        "origin": "shipped" if file.shipped else "site",
        "extends": file.extends,
        "blocks": [
            {"name": block.name, "line": block.line, "calls_super": block.calls_super}
            for block in file.blocks
        ],
    }


def _function(function: Replaced) -> dict[str, Any]:
    return {
        "name": function.name,
        "line": function.line,
        "written_against": function.written_against,
        "shipped": function.shipped_version,
        "stale": function.is_stale,
    }


def _row(name: str, chain: Sequence[TemplateFile], replaced: Sequence[Replaced]) -> tuple[str, ...]:
    file = chain[0]
    origin = "shipped" if file.shipped else str(file.path)
    extends = " > ".join(parent.name if parent.shipped else str(parent.path) for parent in chain[1:])
    if file.shipped:
        return name, origin, extends, "", ""
    blocks = ", ".join(f"{block.name}{' + super' if block.calls_super else ''}" for block in file.blocks)
    return name, origin, extends, blocks or "none", ", ".join(function.version for function in replaced)


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    table = new_table()
    for title in ("template", "from", "extends", "blocks that the site replaces", "functions"):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    print_table(table, 1000, is_plain=True)


def _instead(block: str, known: Sequence[str]) -> str:
    return did_you_mean(block, known) or f"blocks are {', '.join(known)}"


def _make_directory(directory: Path) -> None:
    """Creates a directory and its parents, writable only by their owner. Templates that others can write are refused.

    Raises:
        HpcgenError: the directory cannot be created, or others can write to it.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        for path in reversed(missing):
            path.mkdir(mode=0o755)
    except OSError as error:
        raise HpcgenError(f"cannot be created ({error.strerror})", where=FilePlace(error.filename)) from error
    trusted = _trusted_groups()
    require_safe_parents(directory)
    require_trusted(directory.parent, trusted)
    require_trusted(directory, trusted)
