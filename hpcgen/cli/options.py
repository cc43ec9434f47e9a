"""Options that several commands share."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpcgen import api, files
from hpcgen.config.document import split_assignment
from hpcgen.config.shown import is_private
from hpcgen.config.stages import STAGE_ROWS
from hpcgen.errors import ConfigErrors, HpcgenError, Problem

if TYPE_CHECKING:
    from hpcgen.config.loader import Run
    from hpcgen.config.run import RunConfig

Command = TypeVar("Command", bound=Callable[..., Any])

RUN_FILE = Path("run.yaml")
"""The default of --config."""


class StageChoice(click.Choice[str]):
    """One of the stage names in `stages`. Errors suggest the nearest name, or what to type instead."""

    def __init__(self, stages: Iterable[str] = STAGE_ROWS) -> None:
        self._stages = tuple(stages)
        super().__init__(self._stages)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Checks the stage's name."""
        if value in self._stages:
            return str(value)
        from hpcgen.cli.unknown import unknown_stage

        hint = unknown_stage(value, self._stages)
        raise click.BadParameter(f"{value!r} is not a stage of this command; {hint}", ctx, param)


def stage_list(stages: Iterable[str] = STAGE_ROWS) -> str:
    """A table of `stages` and their summaries for the end of a command's help."""
    width = max(map(len, STAGE_ROWS))
    rows = [f"  {name:<{width}}  {STAGE_ROWS[name].summary}" for name in stages]
    return "\n".join(("\b", "Stages:", *rows))


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
strict_option = click.option(
    "--strict", is_flag=True, help="Fail after warnings and notes too, for continuous integration."
)


def _check_assignments(
    context: click.Context, parameter: click.Parameter, assignments: tuple[str, ...]
) -> tuple[str, ...]:
    """Refuses each `--set KEY VALUE` for its missing =, before VALUE is refused as an unknown argument."""
    mistakes: list[Problem] = []
    for assignment in assignments:
        try:
            split_assignment(assignment)
        except HpcgenError as error:
            mistakes += error.mistakes
    if mistakes:
        raise ConfigErrors(mistakes)
    return assignments


def override_option(command: Command) -> Command:
    """Adds --set, which overrides values of the run file."""
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="A.B=C",
        callback=_check_assignments,
        help="Override a value of the run file; repeatable.",
    )(command)


def run_options(command: Command, help: str = "The run file.") -> Command:
    """Adds --config and --set."""
    return click.option(
        "-c",
        "--config",
        "config",
        type=click.Path(path_type=Path),
        default=RUN_FILE,
        show_default=True,
        metavar="RUN.YAML",
        help=help,
    )(override_option(command))


def run_file_option(help: str) -> Callable[[Command], Command]:
    """Adds --config and --set, both optional."""

    def add(command: Command) -> Command:
        return click.option(
            "-c", "--config", "config", type=click.Path(path_type=Path), metavar="RUN.YAML", help=help
        )(override_option(command))

    return add


def run_or_cluster_options(command: Command) -> Command:
    """Adds --config, --set, and for stages that need no run file --cluster with --run-dir."""
    command = click.option(
        "-c",
        "--config",
        "config",
        type=click.Path(path_type=Path),
        metavar="RUN.YAML",
        help=f"The run file.  [default: {RUN_FILE}, unless --cluster is given]",
    )(override_option(command))
    command = click.option(
        "--run-dir",
        metavar="DIR",
        help="With --cluster: directory for logs and results.  [default: runs/CLUSTER]",
    )(command)
    return click.option(
        "--cluster",
        metavar="PROFILE",
        shell_complete=complete_clusters,
        help="Cluster profile, in place of a run file for stages that need none.",
    )(command)


def complete_clusters(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Profile names for shell completion."""
    from hpcgen.config.profiles import cluster_names

    return [name for name in cluster_names() if name.startswith(incomplete)]


def read_run(
    stage: str, config: Path | None, cluster: str | None, run_dir: str | None, overrides: tuple[str, ...]
) -> Run:
    """Reads the run for `stage` from the options of `run_or_cluster_options`.

    Raises:
        HpcgenError: the options conflict, or the run file or profile is invalid.
    """
    if config is None and cluster is not None and STAGE_ROWS[stage].needs:
        others = ", ".join(name for name, other in STAGE_ROWS.items() if not other.needs)
        hint = f"use -c run.yaml. --cluster alone works for {others}"
        raise HpcgenError(f"stage {stage} needs a run file", hint)
    return read_run_or_cluster(config, cluster, run_dir, overrides)


def read_run_or_cluster(
    config: Path | None, cluster: str | None, run_dir: str | None, overrides: tuple[str, ...]
) -> Run:
    """Reads the run for commands that only display it. A cluster profile alone is enough for every stage.

    Raises:
        HpcgenError: see `read_run`.
    """
    from hpcgen.config.loader import load_cluster_run

    if config is not None and cluster is not None:
        raise HpcgenError(f"-c {config} and --cluster {cluster} exclude each other", "use only one of them")
    if cluster is None:
        config = config or RUN_FILE
        if run_dir is not None:
            raise HpcgenError(
                "--run-dir requires --cluster",
                f"to override paths.run_dir of {config}, use --set paths.run_dir=DIR",
            )
        return api.load_run(config, overrides)
    name = Path(cluster).name.removesuffix(".yaml")
    return load_cluster_run(cluster, run_dir or f"runs/{name}", overrides)


def read_absolute(config: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run file. Its paths become absolute.

    Raises:
        HpcgenError: the run file is invalid.
    """
    from hpcgen.planning.paths import absolute_paths

    run = api.load_run(config, overrides)
    return absolute_paths(run.config, run.directory)


def templates_option(command: Command) -> Command:
    """Adds --templates, the directories of site templates."""
    return click.option(
        "--templates",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Directory of site templates; repeatable. Searched before HPCGEN_TEMPLATES, the configuration "
        "directories and the shipped templates.",
    )(command)


def write_output(output: Path, text: str, mode: int) -> None:
    """Writes a command's result to `output`; "-" is standard output.

    Raises:
        HpcgenError: the file cannot be written, or its directory does not exist.
    """
    if str(output) == "-":
        click.echo(text, nl=False)
        return
    files.write_output(output, text, mode)
    click.echo(f"wrote {output}", err=True)


def program() -> str:
    """The command as the user can call it: `hpcgen` if that is on PATH, otherwise the path that was called."""
    called, found = sys.argv[0], shutil.which("hpcgen")
    if Path(called).name != "hpcgen" or (found and Path(found).samefile(called)):
        return "hpcgen"
    return shlex.quote(called)


def run_arguments(config: Path, overrides: Sequence[str]) -> str:
    """The options --config and --set of this call, for the command to type next, without values that may be secret."""
    words = ["-c", str(config)]
    for override in overrides:
        key, _, value = override.partition("=")
        words += ["--set", f"{key}=..." if is_private(key) or "://" in value else override]
    return shlex.join(words)


def short_path(path: Path) -> str:
    """A path for a command line, relative if it is below the working directory."""
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def warn(messages: Iterable[str]) -> None:
    """Prints warnings to standard error."""
    for message in messages:
        click.secho(f"warning: {message}", fg="yellow", err=True)
