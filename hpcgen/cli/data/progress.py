"""Progress of data commands: a bar on a terminal, occasional lines in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from hpcgen.text import counted, duration, scaled, size_text

if TYPE_CHECKING:
    from hpcgen.data.progress import Progress

_LINE_INTERVAL_S = 15.0
"""Seconds between progress lines when stderr is not a terminal."""


@contextlib.contextmanager
def shown() -> Iterator[Callable[[Progress], None]]:
    """A callback that shows a task's progress on stderr."""
    if not sys.stderr.isatty():
        yield lines()
        return
    from hpcgen.cli.terminal import BarColumn, TaskID, TaskProgressColumn, TextColumn, bars

    columns = (BarColumn(bar_width=10), TaskProgressColumn(), TextColumn("{task.description}"))
    started = time.monotonic()
    with bars(*columns) as bar:
        tasks: list[TaskID] = []

        def show(progress: Progress) -> None:
            if not tasks:
                tasks.append(bar.add_task(""))
            description = " · ".join(_in_short(progress, time.monotonic() - started))
            bar.update(tasks[0], total=progress.bytes, completed=progress.bytes_done, description=description)

        yield show


def lines(interval_s: float = _LINE_INTERVAL_S) -> Callable[[Progress], None]:
    """A callback that writes a line to stderr every `interval_s` seconds."""
    started = last = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= interval_s:
            last = now
            click.echo(f"{progress.stage}: {', '.join(_in_full(progress, now - started))}", err=True)

    return show


def _in_full(progress: Progress, seconds: float) -> Iterator[str]:
    """Yields files, bytes, documents, tokens, rate and remaining time."""
    yield f"{progress.units_done:,} of {counted(progress.units, 'file')}"
    yield f"{size_text(progress.bytes_done)} of {size_text(progress.bytes)}"
    if progress.documents:
        yield counted(progress.documents, "document")
    if progress.tokens:
        yield counted(progress.tokens, "token")
    yield from _rate_and_remaining(progress, seconds)


def _in_short(progress: Progress, seconds: float) -> Iterator[str]:
    """Yields the figures of a progress bar, abbreviated for 80 columns."""
    yield f"{progress.units_done:,}/{counted(progress.units, 'file')}"
    yield size_text(progress.bytes_done)
    yield from _rate_and_remaining(progress, seconds)
    if progress.documents:
        yield f"{scaled(progress.documents)} docs"
    if progress.tokens:
        yield f"{scaled(progress.tokens)} tokens"


def _rate_and_remaining(progress: Progress, seconds: float) -> Iterator[str]:
    if progress.failed:
        yield f"{progress.failed:,} failed"
    if progress.bytes_new and seconds > 0:
        yield f"{progress.bytes_new / seconds / 1e6:,.1f} MB/s"
        left = progress.bytes - progress.bytes_done
        if left > 0:
            yield f"{duration(round(left * seconds / progress.bytes_new))} left"
