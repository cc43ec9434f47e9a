"""The losses of several runs at the same number of tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from hpcgen.errors import HpcgenError
from hpcgen.report.run import Run, read_run
from hpcgen.runs.failed import failed_text
from hpcgen.runs.history import Column, History
from hpcgen.runs.state import State
from trainer.contract.files.metrics_line import number_or_none

if TYPE_CHECKING:
    from hpcgen.sweeps.points import Sweep

Metric = Literal["valid", "train"]
WINDOW = 0.05
"""Share of the tokens over whose last steps the training loss is averaged, since the loss of one step varies with its
batch."""
_GOES_ON: frozenset[State] = frozenset(("done", "running", "silent", "stopped"))


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run in the comparison. Figures are None if they are not known."""

    name: str
    directory: str
    state: State | Literal["not started"]
    reason: str = ""
    """Why the run failed, hung or died."""
    iteration: int = 0
    train_iters: int | None = None
    tokens: int | None = None
    """Tokens that the run has read."""
    loss: float | None = None
    """Loss by which the runs are compared. None if the run has not reached these tokens."""
    last_train_loss: float | None = None
    last_valid_loss: float | None = None
    tokens_per_s: float | None = None
    """Median of the steps."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs, the lowest loss first. Runs without a comparable loss come last."""

    metric: Metric
    tokens: int | None
    """Number of tokens at which the losses are compared. None if no run has reported a loss."""
    results: tuple[Result, ...]


def compare(sweep: Sweep, metric: Metric | None = None) -> Comparison:
    """Compares the losses of the points of a sweep at the same number of tokens, the best first.

    `metric`: "valid" or "train". Default: "valid" if all points that train have been evaluated.
    """
    return compare_runs(sweep.directories, metric)


def compare_runs(directories: Mapping[str, Path], metric: Metric | None = None) -> Comparison:
    """Compares runs, given by name, at the most tokens that all of them have reached, except those that failed.

    `metric`: validation or training loss. Default: the validation loss if all of these runs have one.
    """
    runs = {name: _read(directory) for name, directory in directories.items()}
    compared = [run for run in runs.values() if run is not None and run.state in _GOES_ON]
    compared = compared or [run for run in runs.values() if run is not None]
    if metric is None:
        metric = (
            "valid" if compared and all(_valid_losses(run.history)[0].size for run in compared) else "train"
        )
    tokens = _common_tokens([_losses(run.history, metric)[0] for run in compared])
    results = [_result(name, directories[name], run, metric, tokens) for name, run in runs.items()]
    results.sort(key=lambda each: math.inf if each.loss is None else each.loss)
    return Comparison(metric=metric, tokens=None if tokens is None else round(tokens), results=tuple(results))


def _read(directory: Path) -> Run | None:
    """The run; None if it has no steps yet."""
    try:
        return read_run(directory, time.time())
    except HpcgenError:
        return None


def _losses(history: History, metric: Metric) -> tuple[Column, Column]:
    """Tokens and the loss after them, without steps that report no loss."""
    if metric == "valid":
        return _valid_losses(history)
    tokens, losses = history.columns["consumed_tokens"], history.columns["loss"]
    known = np.isfinite(tokens) & np.isfinite(losses)
    return tokens[known], losses[known]


def _valid_losses(history: History) -> tuple[Column, Column]:
    found = [
        (event["iteration"], loss)
        for event in history.evaluations
        if event.get("split") == "valid" and (loss := number_or_none(event.get("loss"))) is not None
    ]
    iterations = np.array([iteration for iteration, _ in found], dtype=np.int64)
    position = np.searchsorted(history.iteration, iterations)
    known = position < len(history.iteration)
    tokens = history.columns["consumed_tokens"][position[known]]
    return tokens, np.array([loss for _, loss in found], dtype=np.float64)[known]


def _common_tokens(tokens: Sequence[Column]) -> float | None:
    """The most tokens after which all runs have a loss."""
    last = [float(each.max()) for each in tokens if each.size]
    return min(last) if last else None


def _loss_at(history: History, metric: Metric, tokens: float | None) -> float | None:
    """The loss after `tokens`: of the last evaluation until then, or the mean of the last training steps. None if the
    run has not come so far.
    """
    at, losses = _losses(history, metric)
    if tokens is None or not at.size or at.max() < tokens:
        return None
    until = at <= tokens
    if not until.any():
        return None
    if metric == "valid":
        return float(losses[until][-1])
    recent = until & (at > tokens * (1 - WINDOW))
    return float(losses[recent if recent.any() else until].mean())


def _result(name: str, directory: Path, run: Run | None, metric: Metric, tokens: float | None) -> Result:
    if run is None:
        failure = failed_text(directory)
        state: State | Literal["not started"] = "not started" if failure is None else "failed"
        return Result(name=name, directory=str(directory), state=state, reason=failure or "")
    history = run.history
    read = history.columns["consumed_tokens"][-1]
    rates = history.columns["tokens_per_s"]
    return Result(
        name=name,
        directory=str(directory),
        state=run.state,
        reason=run.word if run.state in ("failed", "hung", "died") else "",
        iteration=int(history.iteration[-1]),
        train_iters=run.train_iters,
        tokens=int(read) if np.isfinite(read) else None,
        loss=_loss_at(history, metric, tokens),
        last_train_loss=_last(_losses(history, "train")[1]),
        last_valid_loss=_last(_valid_losses(history)[1]),
        tokens_per_s=float(np.nanmedian(rates)) if np.isfinite(rates).any() else None,
    )


def _last(values: Column) -> float | None:
    return float(values[-1]) if values.size else None
