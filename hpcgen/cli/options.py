"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpcgen.errors import HpcgenError
from hpcgen.stages import STAGES
from hpcgen.stages.train import TRAIN

if TYPE_CHECKING:
    from hpcgen.config.loader import Run

Command = TypeVar("Command", bound=Callable[..., Any])


class StageChoice(click.Choice[str]):
    """The name of one of `stages`; a mistyped one gets the nearest as a hint, one of the others its command."""

    def __init__(self, stages: Iterable[str] = STAGES) -> None:
        self._stages = tuple(stages)
        super().__init__(self._stages)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The stage of that name."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            from hpcgen.text import did_you_mean

            hint = did_you_mean(str(value), self._stages)
            if value in STAGES:
                hint = f"a script of it is made by hpcgen render {value}"
            raise click.BadParameter(
                f"{error.message.rstrip('.')}{hint and f'; {hint}'}", ctx, param
            ) from None


def stage_list(stages: Iterable[str] = STAGES) -> str:
    """What each of `stages` does, for the end of a command's help."""
    width = max(map(len, STAGES))
    rows = [f"  {name:<{width}}  {STAGES[name].summary}" for name in stages]
    return "\n".join(("\b", "Stages:", *rows))


def override_option(command: Command) -> Command:
    """--set: values over the run file's."""
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="A.B=C",
        help="Override a value of the run file; may be given many times.",
    )(command)


def run_options(command: Command) -> Command:
    """--config and --set: which run."""
    return click.option(
        "-c",
        "--config",
        "config",
        required=True,
        type=click.Path(path_type=Path),
        metavar="RUN.YAML",
        help="The run file.",
    )(override_option(command))


def run_or_cluster_options(command: Command) -> Command:
    """--config, or --cluster with --run-dir for stages that need no model; and --set."""
    command = click.option(
        "-c",
        "--config",
        "config",
        type=click.Path(path_type=Path),
        metavar="RUN.YAML",
        help="The run file.",
    )(override_option(command))
    command = click.option(
        "--run-dir",
        metavar="DIR",
        help="With --cluster: the directory of logs and results.  [default: runs/CLUSTER]",
    )(command)
    return click.option(
        "--cluster",
        metavar="PROFILE",
        shell_complete=complete_clusters,
        help="Instead of a run file, where no model is needed: the cluster profile.",
    )(command)


def stage_option(command: Command) -> Command:
    """--stage: whose environment."""
    choice = click.option(
        "--stage", type=StageChoice(), default=TRAIN.name, show_default=True, help="The stage."
    )
    return choice(command)


def complete_clusters(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of profiles, for the shell's completion."""
    from hpcgen.config.loader import cluster_names

    return [name for name in cluster_names() if name.startswith(incomplete)]


def read_run(
    stage: str, config: Path | None, cluster: str | None, run_dir: str | None, overrides: tuple[str, ...]
) -> Run:
    """The run to plan `stage` of, from the options of `run_or_cluster_options`.

    Raises:
        HpcgenError: the options do not go together; the run file or the profile is wrong.
    """
    if config is None and cluster is not None and STAGES[stage].needs_model:
        others = ", ".join(name for name, other in STAGES.items() if not other.needs_model)
        hint = f"use -c run.yaml; with --cluster alone there are {others}"
        raise HpcgenError(f"stage {stage} needs a run file", hint)
    return read_run_or_cluster(config, cluster, run_dir, overrides)


def read_run_or_cluster(
    config: Path | None, cluster: str | None, run_dir: str | None, overrides: tuple[str, ...]
) -> Run:
    """The run that the options name, for commands that only look at it: a cluster alone serves every stage.

    Raises:
        HpcgenError: as `read_run`.
    """
    from hpcgen.config.loader import load_cluster_run, load_run

    if (config is None) == (cluster is None):
        raise HpcgenError("name a run file or a cluster, one of them", "-c run.yaml, or --cluster azure-ndv5")
    if config is not None:
        if run_dir is not None:
            raise HpcgenError("--run-dir goes with --cluster", f"{config} has paths.run_dir; use --set")
        return load_run(config, overrides)
    assert cluster is not None
    name = Path(cluster).name.removesuffix(".yaml")
    return load_cluster_run(cluster, run_dir or f"runs/{name}", overrides)


def templates_option(command: Command) -> Command:
    """--templates: directories of the site."""
    return click.option(
        "--templates",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="A directory of site templates, looked in before HPCGEN_TEMPLATES, the configuration directories "
        "and the shipped ones; may be given many times.",
    )(command)


def write_output(output: Path, text: str, mode: int) -> None:
    """Writes what a command made to the file that the user named; "-" is standard output.

    Raises:
        HpcgenError: it cannot be written, or its directory is not there.
    """
    if str(output) == "-":
        click.echo(text, nl=False)
        return
    from hpcgen import files

    files.write_output(output, text, mode)
    click.echo(f"wrote {output}", err=True)


def warn(messages: tuple[str, ...]) -> None:
    """Warnings for people, on standard error."""
    for message in messages:
        click.secho(f"warning: {message}", fg="yellow", err=True)
