"""hpcgen templates: list, override, compare and check the templates of job scripts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcgen import api
from hpcgen.cli.lazy import CommandGroup
from hpcgen.cli.options import complete_clusters, json_option, templates_option
from hpcgen.config.directories import configuration_directories
from hpcgen.config.profiles import cluster_names, load_cluster
from hpcgen.config.stages import FRAMES, STAGE_ROWS
from hpcgen.config.trust import require_safe_parents, require_trusted
from hpcgen.errors import FilePlace, HpcgenError
from hpcgen.files import write_text
from hpcgen.slurm.rendering.block_docs import block_docs
from hpcgen.text import counted, did_you_mean, few

if TYPE_CHECKING:
    from hpcgen.check.site import Report
    from hpcgen.slurm.rendering.environment import ShellEnvironment
    from hpcgen.slurm.rendering.inventory import TemplateFile
    from hpcgen.slurm.rendering.replaced import Replaced

NAMES = (*FRAMES, *STAGE_ROWS)


command = CommandGroup("templates")


@command.command("list")
@templates_option
@json_option
def list_command(templates: tuple[Path, ...], as_json: bool) -> None:
    """List the template of each stage and what the site replaces.

    Shows each template's file, the templates it extends, and the blocks and functions that the site replaces.
    """
    from hpcgen.slurm.rendering import inventory, replaced

    environment = _environment(templates)
    chains = {name: inventory.template_chain(environment, name) for name in inventory.TEMPLATES}
    functions = {name: replaced.replaced_functions(environment, name) for name in inventory.TEMPLATES}
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


def _environment(templates: Sequence[Path]) -> ShellEnvironment:
    """The templates from which jobs are rendered."""
    from hpcgen.slurm.rendering.environment import make_environment

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
    from hpcgen.cli.terminal import new_table, print_table

    table = new_table()
    for title in ("template", "from", "extends", "blocks that the site replaces", "functions"):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    print_table(table, 1000, is_plain=True)


def _complete_blocks(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Blocks of the template named in the preceding argument, for shell completion."""
    name = context.params.get("name")
    known = _shipped_blocks(name if name in NAMES else "base")
    return [block for block in known if block.startswith(incomplete)]


def _shipped_blocks(name: str) -> tuple[str, ...]:
    """The blocks of the shipped template of `name`, in the order of the script."""
    from hpcgen.slurm.rendering import environment, inventory

    return inventory.block_names(inventory.template_chain(environment.make_environment(), name))


@command.command("override")
@click.argument("name", type=click.Choice(NAMES), metavar="NAME")
@click.option(
    "--block",
    "blocks",
    multiple=True,
    metavar="BLOCK",
    shell_complete=_complete_blocks,
    help="Block to replace; repeatable. Default: include every block as a comment.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Template directory. Those in the site's directory, $HPCGEN_SITE/templates or else /etc/hpcgen/templates, "
    "apply to all users.  [default: ~/.config/hpcgen/templates]",
)
def override_command(name: str, blocks: tuple[str, ...], output: Path | None) -> None:
    """Create a site template for stage NAME to edit.

    NAME is a stage, base for all stages, or data for the data stages. The new template extends the shipped one.
    An existing file is never changed.
    """
    from hpcgen.slurm.rendering import inventory, override

    known = _shipped_blocks(name)
    for block in blocks:
        if block not in known:
            raise HpcgenError(f"template {name} has no block {block!r}", _instead(block, known))
    configured = configuration_directories("templates")
    directory = output or configured[0]
    target = directory / inventory.template_file(name)
    if target.is_symlink() or target.exists():
        raise HpcgenError(f"{target} already exists", "edit it, or remove it first")
    _make_directory(target.parent)
    write_text(target, override.override_text(name, known, block_docs(), blocks), mode=0o644)
    click.echo(target)
    option = "" if directory in configured else f" --templates {shlex.quote(str(directory))}"
    click.echo(f"next: edit it, then run hpcgen templates check{option}", err=True)


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


@command.command("diff")
@click.argument("name", type=click.Choice(NAMES), metavar="NAME")
@templates_option
@click.option(
    "--accept", is_flag=True, help="Record the site's functions as up to date with the shipped ones."
)
def diff_command(name: str, templates: tuple[Path, ...], accept: bool) -> None:
    """Show how the site's functions differ from the shipped ones.

    Compares the functions in the site's template NAME. If a shipped function has changed since the site's
    version was written, the change is shown first.
    """
    from hpcgen.slurm.rendering.replaced import replaced_functions, shipped_functions, with_records

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


@command.command("check")
@templates_option
@click.option(
    "--cluster",
    "clusters",
    multiple=True,
    metavar="PROFILE",
    shell_complete=complete_clusters,
    help="Cluster profile; repeatable.  [default: all available profiles]",
)
@json_option
@click.pass_context
def check_command(
    context: click.Context, templates: tuple[Path, ...], clusters: tuple[str, ...], as_json: bool
) -> None:
    """Render every stage for every profile and check the scripts.

    Bash, shellcheck (if installed) and hpcgen lint read the scripts; nothing is run. Exits with status 1 if there are
    findings.
    """
    from hpcgen.check import scripts, shell_programs, site
    from hpcgen.check.lint.syntax import find_shfmt

    find_shfmt()  # now rather than after all scripts are rendered
    directories = api.site_directories(templates)
    report = site.check_site(
        directories, clusters or cluster_names(), scripts.read_scripts, named=bool(clusters)
    )
    shellchecked = shell_programs.has_shellcheck()
    if as_json:
        click.echo(json.dumps(_as_json(report, shellchecked), indent=1))
    else:
        _print_report(report, directories, shellchecked)
    context.exit(1 if report.findings else 0)


def _as_json(report: Report, shellchecked: bool) -> dict[str, Any]:
    findings = [
        {
            "rule": seen.finding.rule,
            "severity": seen.finding.severity,
            "file": seen.finding.path,
            "line": seen.finding.line,
            "why": seen.finding.problem.reason,
            "fix": seen.finding.problem.hint,
            "seen": seen.scripts,
        }
        for seen in report.findings
    ]
    return {
        "clusters": report.clusters,
        "scripts": report.num_scripts,
        "shellcheck": shellchecked,
        "findings": findings,
    }


def _print_report(report: Report, directories: Sequence[Path], shellchecked: bool) -> None:
    for seen in report.findings:
        finding = seen.finding
        color = "red" if finding.severity == "error" else "yellow"
        click.echo(f"{seen.where}: {click.style(finding.rule, fg=color)}: {finding.problem.reason}")
        click.echo(f"    why: {seen.why}")
        click.echo(f"    fix: {finding.problem.hint}")
        if seen.scripts:
            click.echo(f"    in:  {few(seen.scripts, separator=';')}")
    sites = ", ".join(str(directory) for directory in directories) or "the shipped templates only"
    num_findings = len(report.findings)
    click.echo(
        f"{counted(num_findings, 'finding') if num_findings else 'no findings'}: "
        f"{counted(report.num_scripts, 'script')} for {', '.join(report.clusters)}, with {sites}",
        err=True,
    )
    if not shellchecked:
        click.secho(
            "shellcheck is not installed, so the scripts were checked without it", fg="yellow", err=True
        )
