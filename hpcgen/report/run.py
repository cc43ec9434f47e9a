"""A run's directory as a report needs it: what was recorded, how it ended, and the configuration it runs with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgen.checkpoints.run_config import read_trained_config
from hpcgen.errors import HpcgenError
from hpcgen.report.history import History, read_history
from hpcgen.report.state import State, state_of


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run to report on."""

    directory: Path
    name: str
    history: History
    config: dict[str, Any]
    """The trainer's configuration of the newest attempt that trained; empty where the directory holds none."""
    state: State
    word: str
    """Why it failed, hung or died, or the last sign of life of a run that goes on; empty when it left neither."""
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
    config = read_trained_config(directory)
    state, word = state_of(directory, history, now)
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
