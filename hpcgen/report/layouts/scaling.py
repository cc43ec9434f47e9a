"""Throughput, time and cost of a run by its number of GPUs, each with the fastest layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from hpcgen.planning.layouts.nodes import MOST_NODES
from hpcgen.planning.run_time import RunTime
from hpcgen.report.chart import Chart, Series, Style, draw
from hpcgen.report.scale import Scale
from hpcgen.run_plan.layouts.result import NodesLayouts
from hpcgen.run_plan.prediction import Prediction
from hpcgen.text import counted

FEWEST = 2
"""Numbers of nodes below which there is no curve."""
MOST_VALUES = 8
"""Numbers of GPUs to write at the axis."""
DAY_S = 86400
Range = tuple[float, float, float]
"""Lowest, likely and highest value."""


def scaling_charts(found: Sequence[NodesLayouts], own_nodes: int) -> list[Chart]:
    """The charts; none if fewer than FEWEST numbers of nodes have a prediction.

    `found` is in ascending order of the number of nodes, and contains numbers on which no layout fits.
    """
    known = [(each.num_gpus, each.prediction) for each in found if each.prediction is not None]
    if len(known) < FEWEST:
        return []
    gpus = [number for number, _ in known]
    style = Style(
        unit="",
        x_unit="number of GPUs",
        x_values=gpus[:: -(-len(gpus) // MOST_VALUES)],
        from_zero=True,
        verticals=[
            (each.num_gpus, f"the run file: {counted(own_nodes, 'node')}")
            for each in found
            if each.num_nodes == own_nodes
        ],
    )
    x_scale = Scale(low=gpus[0] / 1.15, high=gpus[-1] * 1.15, is_log=True)
    curves = [
        ("scaling", "Throughput", replace(style, unit="tokens/s per GPU", note="; ".join(_ends(found))), _throughput),
        ("days", "Time in jobs", replace(style, unit="days", log_from=5), _days),
        _cost_curve(known[0][1], style),
    ]  # fmt: skip
    series = [
        _series(color, gpus, [value(each) for _, each in known])
        for color, (_, _, _, value) in enumerate(curves)
    ]
    charts = [
        draw(key, f"{title} by number of GPUs", [line], x_scale, style)
        for (key, title, style, _), line in zip(curves, series, strict=True)
    ]
    return [chart for chart in charts if chart is not None]


def _series(color: int, gpus: Sequence[int], ranges: Sequence[Range]) -> Series:
    low, likely, high = np.array(ranges).T
    return Series(
        label="best layout",
        middle_label="likely",
        color=color,
        x=np.array(gpus, dtype=float),
        low=low,
        high=high,
        middle=likely,
        kind="dots",
    )


def _cost_curve(found: Prediction, style: Style) -> tuple[str, str, Style, Callable[[Prediction], Range]]:
    """Cost, or GPU-hours without a price."""
    if found.price_per_gpu_hour is None:
        return "cost", "GPU-hours", replace(style, unit="GPU-hours"), _gpu_hours
    return "cost", "Cost", replace(style, unit=found.currency), _cost


def _throughput(found: Prediction) -> Range:
    likely = found.tokens_per_s / found.trainer.world_size
    return likely / found.range[1], likely, likely / found.range[0]


def _days(found: Prediction) -> Range:
    return _of_run(found, lambda run: run.total_s / DAY_S)


def _gpu_hours(found: Prediction) -> Range:
    return _of_run(found, lambda run: run.gpu_hours)


def _cost(found: Prediction) -> Range:
    return _of_run(found, lambda run: found.cost(run) or 0.0)


def _of_run(found: Prediction, value: Callable[[RunTime], float]) -> Range:
    return value(found.low), value(found.likely), value(found.high)


def _ends(found: Sequence[NodesLayouts]) -> Iterator[str]:
    """Why the curves of `find_curve` begin and end where they do."""
    fits = [index for index, each in enumerate(found) if each.first is not None]
    for each in found[: fits[0]][-1:]:
        yield f"no layout fits on {counted(each.num_nodes, 'node')}"
    if after := found[fits[-1] + 1 :]:
        batch = counted(after[0].run.config.training.global_batch_size, "sample")
        yield f"no layout is valid on {counted(after[0].num_nodes, 'node')}, with a batch of {batch}"
    elif (more := 2 * found[-1].num_nodes) <= MOST_NODES:
        yield f"the partition allows fewer than {more:,} nodes"
