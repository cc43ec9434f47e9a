"""A run's directory as a report needs it: what was recorded, how it ended, and the configuration it runs with."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hpcgen.errors import HpcgenError
from hpcgen.report.history import History, number_or_none, read_history
from hpcgen.report.words import duration
from hpcgen.run_config import read_run_config

State = Literal["done", "stopped", "failed", "running", "silent"]

SILENT_S = 900.0
"""A run that has written nothing for so long hangs, waits in the queue, or is gone: a collective may take 600 s."""
SILENT_STEPS = 20.0
"""Nor is a run silent before so many of its steps would have fitted into the time."""
_MARKERS: dict[str, State] = {"FAILED": "failed", "STOPPED": "stopped", "DONE": "done"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run to report on."""

    directory: Path
    name: str
    history: History
    config: dict[str, Any]
    """The trainer's configuration in its newest form; empty where none lies in the directory."""
    state: State
    word: str
    """Why it failed, or the last sign of life of a run that has not ended; empty when it left neither."""
    hangs: tuple[str, ...]
    """Directories with the stacks of ranks that hung."""
    now: float
    """When it was looked at."""

    @property
    def train_iters(self) -> int | None:
        """Steps of the whole run, when they are known."""
        found = self.history.start.get("train_iters") or self.config.get("training", {}).get("train_iters")
        return found if isinstance(found, int) else None


def read_run(directory: Path, now: float) -> Run:
    """Reads a run's directory at the time `now` (Unix seconds).

    Raises:
        HpcgenError: it is not one, cannot be read, or nothing was trained in it yet.
    """
    try:
        return _read_run(directory, now)
    except OSError as error:
        raise HpcgenError(f"{error.filename or directory}: cannot be read ({error.strerror})") from error


def _read_run(directory: Path, now: float) -> Run:
    if directory.is_file():
        raise HpcgenError(f"{directory} is a file", f"name the run's directory: {directory.parent}")
    if not directory.exists():
        raise HpcgenError(f"{directory}: no such directory", "name the directory of a run (paths.run_dir)")
    history = read_history(directory / "metrics.jsonl")
    config, _ = read_run_config(directory)
    state, word = _state(directory, history, now)
    return Run(
        directory=directory,
        name=str(history.start.get("name") or config.get("name") or directory.absolute().name),
        history=history,
        config=config,
        state=state,
        word=word,
        hangs=tuple(sorted(_hangs(directory))),
        now=now,
    )


def _hangs(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("stacks*") if path.is_dir() and any(path.iterdir())]


def _state(directory: Path, history: History, now: float) -> tuple[State, str]:
    for marker, state in _MARKERS.items():
        with contextlib.suppress(OSError):
            text = (directory / marker).read_text(encoding="utf-8", errors="replace").strip()
            return state, text if state == "failed" else ""
    beat = _heartbeat(directory)
    words = [history.lives[-1].last_time if history.lives else None, number_or_none(beat.get("time"))]
    last = max((word for word in words if word is not None), default=None)
    step = history.columns["step_time_s"][-1]
    limit = max(SILENT_S, SILENT_STEPS * step if np.isfinite(step) else 0)
    word = f"{beat.get('phase')} on {beat.get('host')}, iteration {beat.get('iteration')}" if beat else ""
    ago = f"last sign of life {duration(max(0.0, now - last))} ago" if last is not None else ""
    return "silent" if last is None or now - last > limit else "running", ": ".join(filter(None, (ago, word)))


def _heartbeat(directory: Path) -> dict[str, Any]:
    """Where rank 0 was last; empty when that is not known."""
    try:
        beat = json.loads((directory / "heartbeat").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return beat if isinstance(beat, dict) else {}
