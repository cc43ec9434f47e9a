"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

STAGES = ("tokenize", "train")


def run_options(command: Command) -> Command:
    """--config and --set: which run."""
    command = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="A.B=C",
        help="Override a value of the run file; may be given many times.",
    )(command)
    return click.option(
        "-c",
        "--config",
        "config",
        required=True,
        type=click.Path(path_type=Path),
        metavar="RUN.YAML",
        help="The run file.",
    )(command)


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


def warn(messages: tuple[str, ...]) -> None:
    """Warnings for people, on standard error."""
    for message in messages:
        click.secho(f"warning: {message}", fg="yellow", err=True)
