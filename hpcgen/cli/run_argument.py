"""The argument RUN of commands: the directory of a run, or its run file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from hpcgen import api
from hpcgen.cli.options import RUN_FILE
from hpcgen.text import harmless


def run_directory(path: Path) -> Path:
    """The run directory that a path means: itself, or paths.run_dir of a run file.

    Raises:
        HpcgenError: the run file is invalid.
    """
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return path
    return directory_in(path)


def tell_unread(problems: Iterable[str]) -> None:
    """Warns that what follows is not all that the run recorded."""
    for problem in problems:
        click.secho(f"warning: {harmless(problem)}", fg="yellow", err=True)


def directory_in(file: Path, overrides: Sequence[str] = ()) -> Path:
    """The run directory that a run file names, with values of --set.

    Raises:
        HpcgenError: the run file is invalid.
    """
    run = api.load_run(file, overrides)
    return Path(run.directory, run.config.paths.run_dir)


def run_directories(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The run directories that RUN... means. Without any: that of ./run.yaml, or else the current directory.

    Raises:
        HpcgenError: a run file is invalid.
    """
    given = paths or (RUN_FILE if RUN_FILE.is_file() else Path(),)
    return tuple(map(run_directory, given))
