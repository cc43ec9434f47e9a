"""Tables and progress bars of rich. It imports slowly, so commands import this module where they show something."""

from __future__ import annotations

import sys

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
]


def bars(*columns: ProgressColumn, transient: bool = True) -> Progress:
    """Progress bars on stderr. `transient` removes them at the end."""
    return Progress(*columns, console=Console(stderr=True), transient=transient)


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
    console.print(table)
