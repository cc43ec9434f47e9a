"""The live view of hpcgen status --watch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hpcgen.cli.status_rows import lines, rows
from hpcgen.runs.look import MOST_WITH_LOGS, RunWatcher
from hpcgen.runs.status import RunStatus
from hpcgen.text import counted

SLURM_S = 30.0
"""Seconds between two questions to Slurm, whose controller serves everyone."""


def watch_runs(directories: Sequence[Path], interval_s: float, planned: Collection[Path] = ()) -> None:
    """Shows the status of runs until Ctrl-C, and leaves the last one on the screen.

    Raises:
        HpcgenError: a directory does not exist or may not be read.
    """
    console = Console(highlight=False)
    watcher = RunWatcher(
        directories,
        slurm_s=SLURM_S,
        reads_logs=len(directories) <= MOST_WITH_LOGS,
        planned=planned,
    )
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        while True:
            now = time.time()
            live.update(screen(watcher.look(now), now, console.width, console.height), refresh=True)
            time.sleep(interval_s)


def screen(found: Iterable[RunStatus], now: float, width: int, height: int) -> Text:
    """The status of runs as a screen of this size. What does not fit is left out, and said so."""
    shown: list[str] = []
    for status in found:
        shown += ["", *lines(rows(status, now), width)] if shown else lines(rows(status, now), width)
    footer = f"{time.strftime('%H:%M:%S', time.localtime(now))}, Ctrl-C ends"
    if (left := len(shown) + 1 - height) > 0:
        shown = shown[: height - 1]
        footer = f"{counted(left, 'more line')}; {footer}"
    return Text.from_ansi("\n".join([*shown, footer]))
