"""Tables and progress bars of rich. It imports slowly, so commands import this module where they show something."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

__all__ = [
    "BarColumn",
    "DownloadColumn",
    "MofNCompleteColumn",
    "SpinnerColumn",
    "TaskID",
    "TaskProgressColumn",
    "TextColumn",
    "TimeElapsedColumn",
    "TimeRemainingColumn",
    "TransferSpeedColumn",
    "bars",
    "new_table",
    "print_table",
    "spinner",
]


def bars(*columns: ProgressColumn, transient: bool = True) -> Progress:
    """Progress bars on stderr. `transient` removes them at the end."""
    return Progress(*columns, console=Console(stderr=True), transient=transient)


@contextlib.contextmanager
def spinner() -> Iterator[Callable[[str], None]]:
    """A callback that shows what is done on stderr, with the time so far; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda phase: None
        return
    with bars(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as bar:
        task = bar.add_task("", total=None)
        yield lambda phase: bar.update(task, description=phase)


def new_table() -> Table:
    """A table without lines."""
    return Table(box=None, pad_edge=False)


def print_table(table: Table, width: int, *, is_plain: bool = False) -> None:
    """Prints a table. In a pipe, each row is one line of at most `width` characters.

    `is_plain` turns off rich's markup and the highlighting of values.
    """
    console = Console(
        width=None if sys.stdout.isatty() else width, highlight=not is_plain, markup=not is_plain
    )
    with console.capture() as shown:
        console.print(table)
    for line in shown.get().splitlines():
        click.echo(line.rstrip())  # rich pads the last column
