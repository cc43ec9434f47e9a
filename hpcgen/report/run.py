"""Reads a run directory for a report: its history, its state, and its configuration."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgen.checkpoints.run_config import read_trained_config
from hpcgen.errors import HpcgenError, Problem
from hpcgen.ledger.ledger import Ledger
from hpcgen.ledger.read import ledger_of, training_jobs
from hpcgen.report.evaluations import line, read_results
from hpcgen.runs.answers import Answer, read_answers
from hpcgen.runs.history import History, read_history
from hpcgen.runs.latest import Tail
from hpcgen.runs.state import State, state_of
from hpcgen.text import counted, few
from trainer.contract.evaluation import DIRECTORY, EvaluationResult
from trainer.contract.files.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run to report on."""

    directory: Path
    name: str
    history: History
    config: dict[str, Any]
    """Trainer configuration of the latest attempt that trained; empty if the directory has none."""
    state: State
    word: str
    """Reason why the run failed, hung or died, or the last activity of an unfinished run; empty if unknown."""
    results: tuple[EvaluationResult, ...]
    """Results of the stage evaluate, oldest first."""
    unreadable_results: tuple[Problem, ...]
    """Messages about invalid result files."""
    answers: tuple[Answer, ...]
    """Answers of the model in training, in the order in which it gave them."""
    hangs: tuple[str, ...]
    """Directories with the stacks of hung ranks."""
    ledger: Ledger | None
    """Where its time went; None if its metrics have no start."""
    now: float
    """Time of the report."""

    @property
    def train_iters(self) -> int | None:
        """Total number of steps, if known."""
        found = self.history.start.get("train_iters") or self.config.get("training", {}).get("train_iters")
        return found if isinstance(found, int) else None


def read_run(directory: Path, now: float) -> Run:
    """Reads a run directory at the time `now` (Unix time in seconds).

    Raises:
        HpcgenError: the directory is not a run directory, cannot be read, or has no training steps yet.
    """
    try:
        return _read_run(directory, now)
    except OSError as error:
        raise HpcgenError(f"cannot read {error.filename or directory}: {error.strerror}") from error


def _read_run(directory: Path, now: float) -> Run:
    if directory.is_file():
        hint = (
            f": {directory.parent}"
            if (directory.parent / RunDirectory.METRICS).exists()
            else " (paths.run_dir)"
        )
        raise HpcgenError(f"{directory} is a file", f"give the run directory{hint}")
    if not directory.exists():
        raise HpcgenError("no such directory", "give the directory of a run (paths.run_dir)", where=directory)
    if not (directory / RunDirectory.METRICS).exists():
        raise _no_metrics(directory)
    history = read_history(directory / RunDirectory.METRICS)
    config = read_trained_config(directory)
    state, word = state_of(directory, Tail(directory / RunDirectory.METRICS).read(), now)
    results, unreadable = read_results(directory)
    return Run(
        directory=directory,
        name=str(history.start.get("name") or config.get("name") or directory.absolute().name),
        history=history,
        config=config,
        state=state,
        word=word,
        results=results,
        unreadable_results=unreadable,
        answers=read_answers(directory),
        hangs=tuple(sorted(_hangs(directory))),
        ledger=_ledger(directory, history, now),
        now=now,
    )


def _ledger(directory: Path, history: History, now: float) -> Ledger | None:
    if not history.attempts:
        return None
    return ledger_of(directory, history, training_jobs(directory), now)


def _no_metrics(directory: Path) -> HpcgenError:
    """The error for a directory without metrics, which says what the directory has instead."""
    missing = f"{directory / RunDirectory.METRICS}: no such file"
    if runs := sorted(str(path.parent) for path in directory.glob(f"*/{RunDirectory.METRICS}")):
        where = f"it has {counted(len(runs), 'run directory', 'run directories')}"
        return HpcgenError(
            f"{missing}; {where}", f"name the runs to compare: {few([shlex.quote(run) for run in runs])}"
        )
    results, _ = read_results(directory)
    if results:
        reason = (
            f"the directory has {counted(len(results), 'evaluation')} and no training; {line(results[-1])}"
        )
        return HpcgenError(f"{missing}; {reason}", f"the results are in {directory / DIRECTORY}")
    hint = "the run has not started yet, or this is not the directory of a training run (paths.run_dir)"
    return HpcgenError(missing, hint)


def _hangs(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("stacks*") if path.is_dir() and any(path.iterdir())]
