"""Key figures of a run for the top of the page, for `--json` and for the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcgen.report.comparability import validation_facts
from hpcgen.report.prediction import predicted_step_s
from hpcgen.report.run import Run
from hpcgen.runs.history import Attempt, Column, History
from hpcgen.runs.state import State
from trainer.contract.evaluation import EvaluationResult
from trainer.contract.files.metrics_line import Event, number_or_none

RECENT_LINES = 100
"""Number of lines in the median for the current throughput."""


@dataclass(frozen=True, kw_only=True)
class AttemptSummary:
    """One attempt of the run."""

    number: int
    began: float | None
    """Start time (Unix time in seconds)."""
    waited_s: float | None
    """Seconds from the last line of the previous attempt, kept or lost, to this start."""
    from_iteration: int
    checkpoint: str | None
    """Checkpoint from which the attempt resumed; None for random weights."""
    last_iteration: int
    lost_steps: int
    """Number of steps after the checkpoint from which the next attempt resumed."""
    world_size: int | None
    hosts: tuple[str, ...]
    changed: tuple[tuple[str, Any, Any], ...]
    """Hyperparameters that differ from the checkpoint: name, the checkpoint's value, the new value."""
    passed_over: tuple[str, ...]
    """Newer checkpoints that were invalid, each with the reason and how it was handled."""
    end: str
    """Description of how the attempt ended."""


@dataclass(frozen=True, kw_only=True)
class StragglerSummary:
    """A rank that was slower than the others."""

    rank: int | None
    host: str
    times: int
    worst: float
    """Largest slowdown relative to the median of the ranks."""
    last_iteration: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Key figures of a run. Losses in nats per token, times in seconds, throughput as the median of recent lines."""

    name: str
    directory: str
    state: State
    word: str
    iteration: int
    train_iters: int | None
    consumed_samples: int | None
    consumed_tokens: int | None
    loss: float | None
    """Loss of the last step that has one."""
    lowest_loss: float | None
    evaluations: dict[str, float | None]
    """Last loss of each split."""
    validation_data: dict[str, Any]
    """The settings that the loss of the split valid depends on, by key."""
    results: tuple[EvaluationResult, ...]
    """Results of the stage evaluate, oldest first."""
    unreadable_results: tuple[str, ...]
    """Messages about invalid result files."""
    step_time_s: float | None
    predicted_step_time_s: float | None
    """Predicted time of a step with the current batch size; None if there is no prediction."""
    tokens_per_s: float | None
    tflops_per_device: float | None
    mfu: float | None
    flop_formula: str | None
    peak_tflops: float | None
    peak_memory_gib: float | None
    max_expert_load: float | None
    min_expert_load: float | None
    """Load of the busiest and of the least busy expert, relative to an even share, as the median of recent lines."""
    dropped_share: float | None
    """Share of the choices of experts that were dropped, as the median of recent lines. None without a capacity."""
    shares: dict[str, float]
    """Shares of the step time over the run, on rank 0: data_wait, communication, update (the optimizer), idle."""
    wall_clock_s: float | None
    """Time from the first start to the last line, including the time between jobs."""
    job_time_s: float | None
    """Time in jobs: from the first to the last line of each attempt."""
    productive_share: float | None
    """Fraction of the time in jobs spent in steps that were kept."""
    remaining_s: float | None
    """Remaining time at the current rate; None if the run is not running."""
    starts: int
    spikes: int
    skipped_steps: int
    """Number of lines with a skipped update; the number of such steps if each step has a line."""
    checkpoints: int
    checkpoint_stall_s: float | None
    """Median time that training paused for a checkpoint."""
    checkpoint_write_s: float | None
    attempts: tuple[AttemptSummary, ...]
    stragglers: tuple[StragglerSummary, ...]
    hangs: tuple[str, ...]
    """Directories with the stacks of hung ranks."""
    unreadable_lines: int


def summarize(run: Run) -> Summary:
    """Computes the key figures of a run."""
    history = run.history
    recent = {name: _median(column[-RECENT_LINES:]) for name, column in history.columns.items()}
    iteration = int(history.iteration[-1])
    samples = _last(history.columns["consumed_samples"])
    tokens = _last(history.columns["consumed_tokens"])
    job_time_s = _job_time_s(history)
    seconds = float(np.nansum(history.columns["step_time_s"] * history.weights))
    step_time_s, left = recent["step_time_s"], (run.train_iters or iteration) - iteration
    return Summary(
        name=run.name,
        directory=str(run.directory),
        state=run.state,
        word=run.word,
        iteration=iteration,
        train_iters=run.train_iters,
        consumed_samples=int(samples) if samples is not None else None,
        consumed_tokens=int(tokens) if tokens is not None else None,
        loss=_last(history.columns["loss"]),
        lowest_loss=_extreme(history.columns["loss"], np.nanmin),
        evaluations={
            str(event.get("split")): number_or_none(event.get("loss")) for event in history.evaluations
        },
        validation_data=validation_facts(run.config),
        results=run.results,
        unreadable_results=tuple(map(str, run.unreadable_results)),
        step_time_s=step_time_s,
        predicted_step_time_s=predicted_step_s(run, recent["batch_size"]),
        tokens_per_s=recent["tokens_per_s"],
        tflops_per_device=recent["model_tflops_per_device"],
        mfu=recent["mfu"],
        flop_formula=history.start.get("flop_formula"),
        peak_tflops=number_or_none(history.start.get("peak_tflops")),
        peak_memory_gib=_extreme(history.columns["peak_memory_gib"], np.nanmax),
        max_expert_load=recent["moe_max_load"],
        min_expert_load=recent["moe_min_load"],
        dropped_share=recent["moe_dropped"],
        shares=dict(_shares(history)),
        wall_clock_s=_wall_clock_s(history),
        job_time_s=job_time_s,
        productive_share=min(1.0, seconds / job_time_s) if job_time_s else None,
        remaining_s=left * step_time_s
        if run.state == "running" and step_time_s is not None and left
        else None,
        starts=len(history.attempts),
        spikes=len(history.spikes),
        skipped_steps=int(np.nansum(history.columns["skipped"])),
        checkpoints=len(history.checkpoints),
        checkpoint_stall_s=_median_of(history.checkpoints, "stall_s"),
        checkpoint_write_s=_median_of(history.checkpoints, "write_s"),
        attempts=tuple(_attempt(run, number) for number in range(len(history.attempts))),
        stragglers=tuple(_stragglers(history.stragglers)),
        hangs=run.hangs,
        unreadable_lines=history.unreadable_lines,
    )


def _attempt(run: Run, number: int) -> AttemptSummary:
    attempts = run.history.attempts
    attempt, before = attempts[number], attempts[number - 1] if number else None
    after = attempts[number + 1] if number + 1 < len(attempts) else None
    start, lost = attempt.start, after.lost_iteration if after else None
    began, ended = attempt.began, (attempt.lost_time or before.last_time) if before else None
    return AttemptSummary(
        number=number + 1,
        began=began,
        waited_s=max(0.0, began - ended) if began is not None and ended is not None else None,
        from_iteration=attempt.iteration,
        checkpoint=str(start["checkpoint"]) if start.get("checkpoint") else None,
        last_iteration=attempt.last_iteration,
        lost_steps=max(0, lost - attempt.last_iteration) if lost is not None else 0,
        world_size=start.get("world_size"),
        hosts=tuple(map(str, start["hosts"])) if isinstance(start.get("hosts"), list) else (),
        changed=tuple((str(name), old, new) for name, old, new in _changes(start)),
        passed_over=tuple(map(str, start["passed_over"]))
        if isinstance(start.get("passed_over"), list)
        else (),
        end=_end(run, attempt, is_last=number == len(attempts) - 1),
    )


def _changes(start: Event) -> list[list[Any]]:
    found = start.get("changed")
    return (
        [each for each in found if isinstance(each, list) and len(each) == 3]
        if isinstance(found, list)
        else []
    )


def _end(run: Run, attempt: Attempt, *, is_last: bool) -> str:
    """Describes how an attempt ended. A killed attempt records no reason."""
    stopped = f"stopped: {attempt.stop_reason}" if attempt.stop_reason else ""
    if not is_last:
        if attempt.last_iteration == attempt.start.get("train_iters"):
            return "completed the last iteration planned at its start"
        return stopped or "ended without a message: it was killed, crashed, or lost a node; see its log"
    return {
        "done": "completed the last iteration",
        "stopped": stopped or "stopped and saved",
        "failed": f"failed: {run.word}",
        "hung": f"hung: {run.word}",
        "died": f"its last message: {attempt.stop_reason}"
        if attempt.stop_reason
        else "ended without a message: it was killed or crashed; see its log",
        "running": stopped or "still running",
        "silent": stopped or "no recent output",
    }[run.state]


def _stragglers(events: Sequence[Event]) -> list[StragglerSummary]:
    """One summary per rank and host, the most frequent stragglers first."""
    found: dict[tuple[Any, str], list[Event]] = {}
    for event in events:
        found.setdefault((event.get("rank"), str(event.get("host") or "?")), []).append(event)
    summaries = [
        StragglerSummary(
            rank=rank,
            host=host,
            times=len(of_rank),
            worst=max(number_or_none(event.get("slowdown")) or 0.0 for event in of_rank),
            last_iteration=max(event["iteration"] for event in of_rank),
        )
        for (rank, host), of_rank in found.items()
    ]
    return sorted(summaries, key=lambda each: (-each.times, -each.worst))


def _shares(history: History) -> list[tuple[str, float]]:
    columns, weights = history.columns, history.weights
    shares = []
    for name in ("data_wait_s", "communication_s", "update_s", "idle_s"):
        known = np.isfinite(columns[name]) & np.isfinite(columns["step_time_s"])
        total = float((columns["step_time_s"] * weights)[known].sum())
        if total > 0:
            shares.append((name.removesuffix("_s"), float((columns[name] * weights)[known].sum()) / total))
    return shares


def _wall_clock_s(history: History) -> float | None:
    first = history.attempts[0].began if history.attempts else None
    last = history.attempts[-1].last_time if history.attempts else None
    return last - first if first is not None and last is not None and last > first else None


def _job_time_s(history: History) -> float | None:
    """Sum of the attempts' durations. An attempt whose last steps were repeated ended with the last of these."""
    total = 0.0
    for attempt, after in itertools.zip_longest(history.attempts, history.attempts[1:]):
        ended = (after.lost_time if after else None) or attempt.last_time
        if attempt.began is not None and ended is not None:
            total += max(0.0, ended - attempt.began)
    return total or None


def _median_of(events: Sequence[Event], name: str) -> float | None:
    return _median(
        np.array([value for event in events if (value := number_or_none(event.get(name))) is not None])
    )


def _median(values: Column) -> float | None:
    numbers = values[np.isfinite(values)]
    return float(np.median(numbers)) if len(numbers) else None


def _last(values: Column) -> float | None:
    numbers = values[np.isfinite(values)]
    return float(numbers[-1]) if len(numbers) else None


def _extreme(values: Column, choose: Any) -> float | None:
    return float(choose(values)) if np.isfinite(values).any() else None
