"""hpcgen env: the environment of a stage for scripts that hpcgen did not write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.cli.options import read_run_or_cluster, run_or_cluster_options, stage_option, warn

if TYPE_CHECKING:
    from hpcgen.planning.environment import Variable
    from hpcgen.planning.explanation import Explanation

NOT_FOR_A_SHELL = ("LD_LIBRARY_PATH",)
"""Would change the programs of the shell that reads the exports, before any task starts."""


@click.command("env")
@run_or_cluster_options
@stage_option
@click.option(
    "--format",
    "form",
    type=click.Choice(("sh", "json")),
    default="sh",
    show_default=True,
    help="Exports with reasons and the list for --container-env, or the same as JSON.",
)
def command(
    config: Path | None,
    cluster: str | None,
    run_dir: str | None,
    overrides: tuple[str, ...],
    stage: str,
    form: str,
) -> None:
    """Print the environment of a stage for a script of your own: eval "$(hpcgen env --cluster azure-ndv5)"

    The exports are those of the script that hpcgen renders. HPCGEN_CONTAINER_ENV, which is not exported, holds
    the names for srun --container-env="$HPCGEN_CONTAINER_ENV": a value that the image sets wins over one that is
    not named.
    """
    from hpcgen.planning.explanation import explain

    explained = explain(stage, read_run_or_cluster(config, cluster, run_dir, overrides))
    warn(explained.warnings)
    variables = [variable for variable in explained.variables if variable.name not in NOT_FOR_A_SHELL]
    left_out = [variable for variable in explained.variables if variable.name in NOT_FOR_A_SHELL]
    warn(tuple(_left_out(variable) for variable in left_out))
    names = [name for name in explained.container_environment() if name not in NOT_FOR_A_SHELL]
    if form == "json":
        values = {variable.name: variable.value for variable in variables}
        click.echo(json.dumps({"environment": values, "container_env": names}, indent=1))
        return
    # whole or not at all: a shell would run the first half
    click.echo("\n".join(_shell_lines(explained, variables, names, has_run_file=config is not None)))


def _left_out(variable: Variable) -> str:
    return (
        f"{variable.name} ({variable.origin}) is left out: it would change the programs of this shell; "
        f"give it to the tasks, behind srun's options: env {variable.name}=... COMMAND"
    )


def _shell_lines(
    explained: Explanation, variables: list[Variable], names: list[str], has_run_file: bool
) -> Iterator[str]:
    """The exports by name, each below its reason, and the list of names."""
    from hpcgen.slurm.rendering import filters
    from hpcgen.version import __version__

    def comment(text: str) -> str:
        return f"# {filters.comment(text)}"

    yield comment(f"stage {explained.stage} on {explained.cluster}; made by hpcgen {__version__}")
    if not has_run_file:
        yield from map(comment, _open_without_a_run_file(explained))
    for variable in variables:
        yield ""
        yield comment(f"{variable.why} ({variable.layer}, {variable.origin})")
        yield f"export {filters.variable(variable.name)}={filters.shell_word(variable.value)}"
    yield ""
    exported = {variable.name for variable in variables}
    if own := [name for name in names if name not in exported]:
        yield comment(f"For you to export before srun: {', '.join(own)}")
    yield comment(
        'For srun --container-env="$HPCGEN_CONTAINER_ENV": a value of the image wins over one not named.'
    )
    yield f"HPCGEN_CONTAINER_ENV={filters.shell_word(','.join(names))}"


def _open_without_a_run_file(explained: Explanation) -> Iterator[str]:
    """What was assumed, and what a run file, or --set in its place, may add to the stage."""
    from hpcgen.planning.explanation import by_change

    yield f"Without a run file: the run directory is {explained.run_dir} (--run-dir names another)."
    for change, variables in by_change(explained.absent).items():
        if change.startswith("--set "):
            values = (f"{variable.name}={variable.value}" for variable in variables)
            yield f"With {change} there is also {', '.join(values)}."
