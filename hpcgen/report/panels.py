"""Charts of a report: all available ones for a single run, and the comparable ones for several runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpcgen.report.chart import Chart, Series, Style, draw
from hpcgen.report.downsample import MAX_BUCKETS, bucket_edges, bucket_means, downsample
from hpcgen.report.evaluations import compare_results, draw_results
from hpcgen.report.experts import draw_expert_loads
from hpcgen.report.scale import Scale
from hpcgen.runs.history import Column, History
from hpcgen.text import few
from trainer.contract.config import NAMED_SPLIT
from trainer.contract.evaluation import EvaluationResult
from trainer.contract.files.metrics_columns import OUTPUT_Z_LOSS
from trainer.contract.files.metrics_line import Event, number_or_none

RECENT_SHARE = 0.75
"""Fraction of the run after which the chart of the recent loss starts."""
MIN_STEPS_FOR_RECENT = 40
"""Minimum number of steps for the chart of the recent loss."""
MAX_STAGES = 4
"""Maximum number of stages of the data that the note below the loss names."""
_SHORTEST_STEP_S = 1e-9
"""Shares of shorter steps, which cannot be real, are not shown."""


@dataclass(frozen=True, kw_only=True)
class NamedHistory:
    """A run's history and its label in the charts."""

    name: str
    history: History
    results: tuple[EvaluationResult, ...] = ()


def draw_charts(runs: Sequence[NamedHistory]) -> list[Chart]:
    """Draws the charts in the order of the page. Charts without data are omitted."""
    chosen = _of_one(runs[0]) if len(runs) == 1 else _of_several(runs)
    return [chart for chart in chosen if chart is not None]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Definition of a chart that shows one column of a run's steps."""

    key: str
    title: str
    column: str
    label: str
    color: int
    smooth: bool = True
    style: Style


GRADIENT_NORM = Panel(
    key="grad-norm",
    title="Gradient norm",
    column="grad_norm",
    label="before clipping",
    color=0,
    style=Style(unit="global norm", log_from=5),
)
LEARNING_RATE = Panel(
    key="lr",
    title="Learning rate",
    column="lr",
    label="learning rate",
    color=0,
    smooth=False,
    style=Style(unit="rate", from_zero=True),
)
THROUGHPUT = Panel(
    key="tokens",
    title="Throughput",
    column="tokens_per_s",
    label="all devices",
    color=2,
    style=Style(unit="tokens/s", from_zero=True),
)
STEP_TIME = Panel(
    key="step-time",
    title="Step time",
    column="step_time_s",
    label="mean since the previous line",
    color=2,
    style=Style(unit="seconds", from_zero=True, log_from=20),
)
MEMORY = Panel(
    key="memory",
    title="Memory",
    column="peak_memory_gib",
    label="peak so far, rank 0",
    color=3,
    smooth=False,
    style=Style(unit="GiB", from_zero=True),
)
BUSIEST_EXPERT = Panel(
    key="expert-load",
    title="Load of the busiest expert",
    column="moe_max_load",
    label="busiest",
    color=1,
    style=Style(unit="of an even share", from_zero=True),
)
BATCH_SIZE = Panel(
    key="batch",
    title="Global batch size",
    column="batch_size",
    label="batch",
    color=2,
    smooth=False,
    style=Style(unit="samples", from_zero=True),
)
LOSS_SCALE = Panel(
    key="scale",
    title="Loss scale",
    column="loss_scale",
    label="fp16",
    color=2,
    smooth=False,
    style=Style(unit="factor", log_from=2),
)


def _of_one(run: NamedHistory) -> Iterator[Chart | None]:
    verticals = (*_restarts(run.history), *_stages(run.history))
    x_scale = _iterations([run])

    def panel(panel: Panel) -> Chart | None:
        line = _line(run, panel.column, panel.label, panel.color, smooth=panel.smooth)
        style = dataclasses.replace(panel.style, verticals=verticals)
        return draw(panel.key, panel.title, [line], x_scale, style)

    yield _loss(run, x_scale, verticals)
    yield _recent_loss(run, verticals)
    yield _mtp_losses(run, x_scale, verticals)
    yield from _objective(run, x_scale, verticals)
    yield from _metrics(run, x_scale, verticals)
    yield from draw_results(run.results, x_scale, verticals)
    yield panel(GRADIENT_NORM)
    yield panel(LEARNING_RATE)
    yield panel(THROUGHPUT)
    yield _flops(run, x_scale, verticals)
    yield panel(STEP_TIME)
    yield _time_shares(run.history, x_scale, verticals)
    yield panel(MEMORY)
    yield from _experts(run, x_scale, verticals)
    yield _checkpoint_times(run.history, x_scale, verticals)
    yield from (panel(each) for each in (BATCH_SIZE, LOSS_SCALE) if _varies(run.history.columns[each.column]))


def _of_several(runs: Sequence[NamedHistory]) -> Iterator[Chart | None]:
    x_scale = _iterations(runs)

    def lines(column: str, *, smooth: bool = True) -> list[Series]:
        return [_line(run, column, run.name, number, smooth=smooth) for number, run in enumerate(runs)]

    yield draw("loss", "Loss", lines("loss"), x_scale, Style(unit="nats per token", log_from=2.5))
    yield _recent_losses(runs)
    yield _loss_by_tokens(runs)
    yield from _validation_losses(runs, x_scale)
    yield _first_mtp_losses(runs, x_scale)
    yield from _own_columns(runs, x_scale)
    yield from compare_results([(run.name, run.results) for run in runs], x_scale)
    for panel in (GRADIENT_NORM, LEARNING_RATE, THROUGHPUT):
        yield draw(panel.key, panel.title, lines(panel.column, smooth=panel.smooth), x_scale, panel.style)
    flops = Style(unit="TFLOP/s per device", from_zero=True)
    yield draw("flops", "Model FLOPs", lines("model_tflops_per_device"), x_scale, flops)
    for panel in (STEP_TIME, MEMORY, BUSIEST_EXPERT):
        yield draw(panel.key, panel.title, lines(panel.column, smooth=panel.smooth), x_scale, panel.style)


def _loss_by_tokens(runs: Sequence[NamedHistory]) -> Chart | None:
    """Plots the loss by tokens consumed, which makes runs with different batch sizes comparable."""
    lines = []
    for number, run in enumerate(runs):
        tokens = run.history.columns["consumed_tokens"]
        is_number = np.isfinite(tokens)
        if is_number.any():
            buckets = downsample(tokens[is_number], run.history.columns["loss"][is_number])
            lines.append(Series.line(run.name, number, buckets, smooth=True))
    if not lines:
        return None
    x_scale = Scale(low=0.0, high=max(float(line.x[-1]) for line in lines) or 1.0)
    style = Style(unit="nats per token", x_unit="tokens", log_from=2.5)
    return draw("loss-by-tokens", "Loss by tokens consumed", lines, x_scale, style)


def _recent_losses(runs: Sequence[NamedHistory]) -> Chart | None:
    """Plots the last quarter of the iterations that all runs have completed."""
    last = min(run.history.iteration[-1] for run in runs)
    first = int(last * RECENT_SHARE)
    lines = []
    for number, run in enumerate(runs):
        iteration, loss = run.history.iteration, run.history.columns["loss"]
        chosen = (iteration >= first) & (iteration <= last)
        if chosen.sum() >= MIN_STEPS_FOR_RECENT * (1 - RECENT_SHARE):
            lines.append(
                Series.line(
                    run.name, number, downsample(iteration[chosen].astype(float), loss[chosen]), smooth=True
                )
            )
    style = Style(unit="nats per token", cuts_outliers=True)
    title = "Loss, last quarter of the common iterations"
    return draw("recent-loss", title, lines, Scale(low=float(first), high=float(last)), style)


def _validation_losses(runs: Sequence[NamedHistory], x_scale: Scale) -> Iterator[Chart | None]:
    """Plots the validation loss, and that of each named set, of all runs."""
    found = {str(event.get("split")) for run in runs for event in run.history.evaluations}
    style = Style(unit="nats per token", log_from=2.5)
    for split in sorted(each for each in found if each == "valid" or each.startswith(NAMED_SPLIT)):
        lines = [_evaluation(run, split, run.name, number) for number, run in enumerate(runs)]
        name = split.removeprefix(NAMED_SPLIT) if split != "valid" else ""
        title = f"Validation loss on {name}" if name else "Validation loss"
        key = f"validation-{name}" if name else "validation"
        yield draw(key, title, [line for line in lines if len(line.x)], x_scale, style)


def _first_mtp_losses(runs: Sequence[NamedHistory], x_scale: Scale) -> Chart | None:
    lines = [
        _line(run, run.history.mtp_losses[0], run.name, number)
        for number, run in enumerate(runs)
        if run.history.mtp_losses
    ]
    style = Style(unit="nats per token", log_from=2.5)
    return draw("mtp-loss", "Loss of the first MTP layer", lines, x_scale, style)


def _loss(run: NamedHistory, x_scale: Scale, verticals: Sequence[tuple[int, str]]) -> Chart | None:
    skipped = run.history.iteration[run.history.columns["skipped"] == 1].astype(float)
    notes = ["ticks at the bottom: steps without an update (overflow or spike)"] if len(skipped) else []
    if stages := run.history.stages[1:]:
        begun = few([f"{stage.name} after iteration {stage.after:,}" for stage in stages], MAX_STAGES)
        notes.append(f"vertical lines: attempts and stages of the data ({begun})")
    style = Style(
        unit="nats per token",
        log_from=2.5,
        note="; ".join(notes),
        verticals=verticals,
        skipped=skipped,
    )
    return draw("loss", "Loss", [_line(run, "loss", "train", 0), *_evaluations(run)], x_scale, style)


def _recent_loss(run: NamedHistory, verticals: Sequence[tuple[int, str]]) -> Chart | None:
    """Plots the end of the loss curve on its own scale. On a common scale, the beginning would hide its details."""
    iteration = run.history.iteration
    first = iteration[0] + int((iteration[-1] - iteration[0]) * RECENT_SHARE)
    chosen = iteration >= first
    if len(iteration) < MIN_STEPS_FOR_RECENT:
        return None
    buckets = downsample(iteration[chosen].astype(float), run.history.columns["loss"][chosen])
    evaluations = [line for line in _evaluations(run, first) if len(line.x)]
    lines = [Series.line("train", 0, buckets, smooth=True), *evaluations]
    x_scale = Scale(low=float(first), high=float(iteration[-1]))
    style = Style(unit="nats per token", verticals=verticals, cuts_outliers=True)
    return draw("recent-loss", "Loss, last quarter", lines, x_scale, style)


def _mtp_losses(run: NamedHistory, x_scale: Scale, verticals: Sequence[tuple[int, str]]) -> Chart | None:
    """Plots the loss of each MTP layer next to the main loss, which does not include them."""
    columns = run.history.mtp_losses
    if not columns:
        return None
    layers = (_line(run, column, f"MTP layer {layer}", layer) for layer, column in enumerate(columns, 1))
    style = Style(unit="nats per token", log_from=2.5, verticals=verticals)
    lines = [_line(run, "loss", "main loss", 0), *layers]
    return draw("mtp-loss", "Losses of the MTP layers", lines, x_scale, style)


def _objective(
    run: NamedHistory, x_scale: Scale, verticals: Sequence[tuple[int, str]]
) -> Iterator[Chart | None]:
    """Plots what steps minimize and its parts next to the loss, and the z-loss, whose scale is another."""
    parts = [name for name in run.history.losses if name != OUTPUT_Z_LOSS]
    if parts:
        style = Style(unit="nats per token", log_from=2.5, verticals=verticals)
        lines = [_line(run, name, name, number) for number, name in enumerate(("loss", *parts))]
        yield draw("objective", "Objective", lines, x_scale, style)
    if OUTPUT_Z_LOSS in run.history.losses:
        style = Style(unit="squared nats", log_from=2.5, verticals=verticals)
        line = _line(run, OUTPUT_Z_LOSS, "log Z squared", 0)
        yield draw("output-z-loss", "Z-loss of the output", [line], x_scale, style)


def _metrics(
    run: NamedHistory, x_scale: Scale, verticals: Sequence[tuple[int, str]]
) -> Iterator[Chart | None]:
    """Plots each metric of the user, in training and in evaluations."""
    for name in run.history.metrics:
        lines = [_line(run, name, "train", 0, smooth=False), *_evaluations(run, column=name)]
        yield draw(f"metric-{name}", name, lines, x_scale, Style(unit="mean", verticals=verticals))


def _own_columns(runs: Sequence[NamedHistory], x_scale: Scale) -> Iterator[Chart | None]:
    """Plots the parts of the objective and the metrics that any of the runs has."""
    histories = [run.history for run in runs]
    names = dict.fromkeys(name for each in histories for name in (*each.losses, *each.metrics))
    for name in names:
        lines = [
            _line(run, name, run.name, number)
            for number, run in enumerate(runs)
            if name in run.history.columns
        ]
        yield draw(f"own-{name}", name, lines, x_scale, Style(unit="mean"))


def _flops(run: NamedHistory, x_scale: Scale, verticals: Sequence[tuple[int, str]]) -> Chart | None:
    """Plots model TFLOP/s, with MFU on the right axis."""
    peak = number_or_none(run.history.start.get("peak_tflops"))
    note = (
        f"right: MFU, relative to the peak of {peak:g} TFLOP/s"
        if peak
        else "no MFU, because the peak is unknown"
    )
    return draw(
        "flops",
        "Model FLOPs",
        [_line(run, "model_tflops_per_device", "per device", 2)],
        x_scale,
        Style(
            unit="TFLOP/s per device",
            from_zero=True,
            note=note,
            verticals=verticals,
            right=(lambda tflops: f"{100 * tflops / peak:.2g}%") if peak else None,
        ),
    )


def _experts(
    run: NamedHistory, x_scale: Scale, verticals: Sequence[tuple[int, str]]
) -> Iterator[Chart | None]:
    """Plots the load of the experts; nothing for a dense model."""
    style = dataclasses.replace(BUSIEST_EXPERT.style, verticals=verticals, note="of all layers")
    lines = [
        _line(run, "moe_max_load", "busiest expert", 1),
        _line(run, "moe_min_load", "least busy expert", 0),
    ]
    yield draw(BUSIEST_EXPERT.key, "Load of the experts", lines, x_scale, style)
    yield draw_expert_loads(run.history.expert_loads)
    dropped = [_line(run, "moe_dropped", "above the capacity", 1)]
    style = Style(unit="fraction of token-expert pairs", from_zero=True, verticals=verticals)
    yield draw("dropped", "Dropped tokens", dropped, x_scale, style)


def _time_shares(history: History, x_scale: Scale, verticals: Sequence[tuple[int, str]]) -> Chart | None:
    style = Style(
        unit="% of the step",
        from_zero=True,
        note="rank 0; the rest up to 100% is computation",
        verticals=verticals,
    )
    return draw("shares", "Time breakdown", _shares(history), x_scale, style)


def _shares(history: History) -> list[Series]:
    """Stacked shares of the step time; empty if no line has them."""
    names = {
        "data_wait_s": "waiting for data",
        "communication_s": "communication",
        "update_s": "optimizer",
        "idle_s": "idle",
    }
    weights = history.weights
    step = bucket_means(history.columns["step_time_s"], weights)
    edges = bucket_edges(len(history.iteration))
    x = history.iteration[np.append(edges[1:], len(history.iteration)) - 1].astype(float)
    floor = np.zeros(len(x))
    areas = []
    for color, (column, label) in zip((1, 4, 2, 5), names.items(), strict=True):
        seconds = bucket_means(history.columns[column], weights)
        if not np.isfinite(seconds).any():
            continue
        share = np.divide(100 * seconds, step, out=np.zeros(len(x)), where=step > _SHORTEST_STEP_S)
        ceiling = floor + np.nan_to_num(share)
        areas.append(Series.area(label, color, x, floor, ceiling))
        floor = ceiling
    return areas


def _checkpoint_times(history: History, x_scale: Scale, verticals: Sequence[tuple[int, str]]) -> Chart | None:
    names = {"stall_s": "training paused", "write_s": "writing"}
    dots = [
        Series.dots(label, color, *_points(history.checkpoints, name))
        for color, (name, label) in enumerate(names.items(), 1)
    ]
    style = Style(unit="seconds", from_zero=True, log_from=20, verticals=verticals)
    return draw("checkpoints", "Checkpoints", dots, x_scale, style)


def _line(run: NamedHistory, column: str, label: str, color: int, *, smooth: bool = True) -> Series:
    history = run.history
    buckets = downsample(history.iteration.astype(float), history.columns[column])
    return Series.line(label, color, buckets, smooth=smooth)


def _evaluations(run: NamedHistory, first: int = 0, column: str = "loss") -> list[Series]:
    splits = sorted({str(event.get("split")) for event in run.history.evaluations}, reverse=True)
    lines = [_evaluation(run, split, split, color, first, column) for color, split in enumerate(splits, 1)]
    return [line for line in lines if len(line.x)]


def _evaluation(
    run: NamedHistory, split: str, label: str, color: int, first: int = 0, column: str = "loss"
) -> Series:
    events = [
        event
        for event in run.history.evaluations
        if str(event.get("split")) == split and event["iteration"] >= first
    ]
    return Series.dots(label, color, *_points(events, column))


def _points(events: Sequence[Event], name: str) -> tuple[Column, Column]:
    """Iterations and values of the events with a value. If there are too many, each bucket keeps its largest value."""
    values = [(event["iteration"], number_or_none(event.get(name))) for event in events]
    found = np.array([(x, y) for x, y in values if y is not None], dtype=float).reshape(-1, 2)
    if len(found) > MAX_BUCKETS:
        parts = np.split(found, bucket_edges(len(found))[1:])
        found = np.array([part[part[:, 1].argmax()] for part in parts])
    return found[:, 0], found[:, 1]


def _iterations(runs: Sequence[NamedHistory]) -> Scale:
    starts = [run.history.attempts[0].iteration for run in runs if run.history.attempts]
    low = min([*starts, *(int(run.history.iteration[0]) - 1 for run in runs)])
    evaluated = (result.iteration for run in runs for result in run.results)
    high = max(*evaluated, *(int(run.history.iteration[-1]) for run in runs), low)
    return Scale(low=float(low), high=float(high))


def _restarts(history: History) -> Iterator[tuple[int, str]]:
    for number, attempt in enumerate(history.attempts[1:], 2):
        yield attempt.iteration, f"attempt {number}, from iteration {attempt.iteration:,}"


def _stages(history: History) -> Iterator[tuple[int, str]]:
    for stage in history.stages[1:]:
        yield stage.after, f"stage {stage.name}, after iteration {stage.after:,}"


def _varies(values: Column) -> bool:
    numbers = values[np.isfinite(values)]
    return len(numbers) > 0 and bool(numbers.min() != numbers.max())
