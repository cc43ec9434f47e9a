"""Results of the stage evaluate in a report: reads them, and selects the metrics that charts and lines show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hpcgen.errors import Problem
from hpcgen.report.chart import Chart, Series, Style, draw
from hpcgen.report.scale import Scale
from hpcgen.report.words import figure, short
from hpcgen.text import counted
from trainer.contract.config import ConfigError
from trainer.contract.evaluation import (
    EvaluationResult,
    Metric,
    TaskResult,
    evaluated,
    read_result,
    result_file,
)

MAIN_METRICS = ("acc_norm", "exact_match", "acc")
"""Metrics that represent a task, the first one that it has. Other tasks are represented by their first metric."""
MAX_CHARTS = 12
"""Maximum number of charts of texts and tasks in a comparison of runs."""


def read_results(run_dir: Path) -> tuple[tuple[EvaluationResult, ...], tuple[Problem, ...]]:
    """The results of a run, oldest first, and the mistakes in result files that are invalid.

    Raises:
        OSError: a file cannot be read.
    """
    results: list[EvaluationResult] = []
    problems: list[Problem] = []
    for iteration in sorted(evaluated(run_dir)):
        try:
            results.append(read_result(result_file(run_dir, iteration)))
        except ConfigError as error:
            problems += error.mistakes
    return tuple(results), tuple(problems)


def main_metric(task: TaskResult) -> Metric | None:
    """The metric that represents a task; None if the task has no metric with a value."""
    known = [metric for metric in task.metrics if metric.value is not None]
    preferred = (metric for name in MAIN_METRICS for metric in known if metric.name == name)
    return next(preferred, known[0] if known else None)


def main_metrics(result: EvaluationResult) -> dict[str, Metric]:
    """The main metric of each task by "TASK METRIC". Of the tasks of a group, only requested ones."""
    groups = any(task.is_group for task in result.tasks)
    shown = [
        task for task in result.tasks if task.is_group or not groups or task.name in result.settings.tasks
    ]
    found = {}
    for task in shown:
        if (metric := main_metric(task)) is not None:
            suffix = "" if metric.filter == "none" else f", {metric.filter}"
            found[f"{task.name} {metric.name}{suffix}"] = metric
    return found


def line(result: EvaluationResult) -> str:
    """The result in one line."""
    limit = result.settings.limit
    texts = (
        f"{text.name} loss {figure(text.loss)} (perplexity {figure(text.perplexity)}"
        + (f"; {counted(text.sequences, 'window')}, {counted(text.tokens, 'token')}" if limit else "")
        + ")"
        for text in result.data
    )
    tasks = (f"{name} {with_error(metric)}" for name, metric in main_metrics(result).items())
    part = f", of a part (evaluation.limit = {limit})" if limit else ""
    return f"evaluation of iteration {result.iteration:,}{part}: {', '.join((*texts, *tasks))}"


def with_error(metric: Metric) -> str:
    """The value with its standard error, such as 0.512 ± 0.005."""
    return figure(metric.value) + (f" ± {figure(metric.stderr, 2)}" if metric.stderr is not None else "")


def draw_results(
    results: Sequence[EvaluationResult], x_scale: Scale, restarts: Sequence[tuple[int, str]]
) -> Iterator[Chart | None]:
    """Draws the losses on texts and the main metrics of tasks of one run over the iterations."""
    note = "right: perplexity"
    losses = Style(unit="nats per token", log_from=2.5, note=note, verticals=restarts, right=_perplexity)
    texts = dict.fromkeys(text.name for result in results for text in result.data)
    lines = [_loss(results, name, name, color) for color, name in enumerate(texts)]
    yield draw("texts", "Loss on texts", lines, x_scale, losses)
    tasks = dict.fromkeys(name for result in results for name in main_metrics(result))
    style = Style(unit="metric", note="band: standard error", verticals=restarts)
    lines = [_metric(results, name, name, color) for color, name in enumerate(tasks)]
    yield draw("tasks", "Tasks", lines, x_scale, style)


def compare_results(
    runs: Sequence[tuple[str, Sequence[EvaluationResult]]], x_scale: Scale
) -> Iterator[Chart | None]:
    """Draws a chart of the runs, given by name, for each text and task. Tasks beyond MAX_CHARTS have none."""
    everything = [result for _, results in runs for result in results]
    texts = dict.fromkeys(text.name for result in everything for text in result.data)
    tasks = dict.fromkeys(name for result in everything for name in main_metrics(result))
    for number, name in enumerate((*texts, *tasks)):
        if number == MAX_CHARTS:
            return
        series = _loss if name in texts else _metric
        unit = "nats per token" if name in texts else "metric"
        title = f"Loss on {name}" if name in texts else name
        lines = [series(results, name, run, color) for color, (run, results) in enumerate(runs)]
        yield draw(f"evaluation-{number}", title, lines, x_scale, Style(unit=unit, log_from=2.5))


def _loss(results: Sequence[EvaluationResult], name: str, label: str, color: int) -> Series:
    found = [
        (result.iteration, text.loss, 0.0)
        for result in results
        for text in result.data
        if text.name == name and text.loss is not None
    ]
    return _dots(label, color, found)


def _metric(results: Sequence[EvaluationResult], name: str, label: str, color: int) -> Series:
    metrics = ((result.iteration, main_metrics(result).get(name)) for result in results)
    found = [
        (iteration, metric.value, metric.stderr or 0.0)
        for iteration, metric in metrics
        if metric is not None and metric.value is not None
    ]
    return _dots(label, color, found)


def _dots(label: str, color: int, found: Sequence[tuple[float, float, float]]) -> Series:
    x, y, error = np.array(found, dtype=float).reshape(-1, 3).T
    return Series.dots(label, color, x, y, error)


def _perplexity(loss: float) -> str:
    return short(math.exp(min(loss, 700.0)), 3)
