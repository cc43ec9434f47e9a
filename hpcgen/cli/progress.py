"""Progress of stages that run on this machine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from hpcgen.text import counted

if TYPE_CHECKING:
    from hpcgen.slurm.job import Progress


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[Progress], None]]:
    """A progress callback: a bar per stage on a terminal, occasional lines elsewhere."""
    if not sys.stderr.isatty():
        yield _ProgressLines()
        return
    from hpcgen.cli.terminal import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        bars,
    )

    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with bars(*columns, transient=False) as shown:
        tasks = {}

        def show(progress: Progress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = shown.add_task(progress.stage, total=None, loss="")
            loss = f"mean loss {progress.metrics['loss']:.3f}" if progress.metrics else ""
            total = progress.total or None
            shown.update(tasks[progress.stage], total=total, completed=progress.done, loss=loss)

        yield show


class _ProgressLines:
    """Prints a line when a stage starts and after each tenth of its steps."""

    def __init__(self) -> None:
        self._stage = ""
        self._tenth = 0

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self._stage:
            self._stage, self._tenth = progress.stage, 0
            click.echo(f"{progress.stage} ...", err=True)
        tenth = 10 * progress.done // progress.total if progress.total else 0
        if tenth > self._tenth:
            self._tenth = tenth
            loss = progress.metrics.get("loss")
            click.echo(
                f"{progress.stage}: {progress.done} of {counted(progress.total, 'file')}"
                if loss is None
                else f"{progress.stage}: step {progress.done} of {progress.total}, mean loss {loss:.3f}",
                err=True,
            )
