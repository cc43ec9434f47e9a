"""hpcgen templates: list, override, compare and check the templates of job scripts."""

from __future__ import annotations

from pathlib import Path

import click

from hpcgen.cli.lazy import CommandGroup
from hpcgen.cli.options import complete_clusters, json_option, templates_option
from hpcgen.config.stages import FRAMES, STAGE_ROWS

NAMES = (*FRAMES, *STAGE_ROWS)


command = CommandGroup("templates")


@command.command("list")
@templates_option
@json_option
def list_command(templates: tuple[Path, ...], as_json: bool) -> None:
    """List the template of each stage and what the site replaces.

    Shows each template's file, the templates it extends, and the blocks and functions that the site replaces.
    """
    from hpcgen.cli.templates_run import list_templates

    list_templates(templates, as_json=as_json)


def _complete_blocks(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Blocks of the template named in the preceding argument, for shell completion."""
    from hpcgen.slurm.rendering.inventory import shipped_blocks

    name = context.params.get("name")
    known = shipped_blocks(name if name in NAMES else "base")
    return [block for block in known if block.startswith(incomplete)]


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
    from hpcgen.cli.templates_run import override_template

    override_template(name, blocks, output)


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
    from hpcgen.cli.templates_run import show_differences

    show_differences(name, templates, accept=accept)


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
    from hpcgen.cli.templates_check import check_templates

    context.exit(check_templates(templates, clusters, as_json=as_json))
