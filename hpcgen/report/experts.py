"""Charts of the load of experts: the busiest and the least busy one by iteration, and each expert of each layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpcgen.report.chart import SIZE, Chart, Path, Tick, rounded, whole_ticks
from hpcgen.report.scale import Scale
from hpcgen.report.words import short
from trainer.contract.files.metrics_line import Event

Loads = NDArray[np.float64]
"""Tokens of each expert divided by the mean over its layer, [MoE layers, experts]."""

BLUE, ORANGE = 0, 1
LEVELS: tuple[tuple[str, float, float, int, Literal["faint", "strong"]], ...] = (
    ("below 0.5", -np.inf, 0.5, BLUE, "strong"),
    ("0.5 to 0.8", 0.5, 0.8, BLUE, "faint"),
    ("1.25 to 2", 1.25, 2.0, ORANGE, "faint"),
    ("2 and more", 2.0, np.inf, ORANGE, "strong"),
)
"""Ranges of loads with a color: legend, bounds, color and strength. Loads near 1 have none."""
MAX_LAYER_TICKS = 8


def draw_expert_loads(events: Sequence[Event]) -> Chart | None:
    """Draws the latest load of each expert, with experts from left to right and layers from bottom to top."""
    found = next(filter(None, map(_loads, reversed(events))), None)
    if found is None:
        return None
    layers, loads, iteration = found
    x_scale = Scale(low=-0.5, high=loads.shape[1] - 0.5)
    return Chart(
        key="experts",
        title="Load of each expert",
        unit="layer",
        note=f"at iteration {iteration:,}: tokens relative to an even share; no color from 0.8 to 1.25",
        summary=f"Load of each expert: {short(loads.min().item())} to {short(loads.max().item())} of an even share",
        paths=tuple(_cells(loads)),
        legend=tuple((label, color, strength) for label, _, _, color, strength in LEVELS),
        x_unit="expert",
        x_ticks=whole_ticks(x_scale),
        y_ticks=tuple(_layer_ticks(layers)),
        right_ticks=(),
        verticals=(),
        hover={
            "low": x_scale.low,
            "high": x_scale.high,
            "unit": "of an even share",
            "x_unit": "expert",
            "series": [_hover(loads)],
        },
    )


def _loads(event: Event) -> tuple[list[int], Loads, int] | None:
    """Layers, loads and iteration of an event; None if it is not one of the trainer's."""
    layers, rows = event.get("layers"), event.get("load")
    try:
        loads = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    if not isinstance(layers, list) or loads.ndim != 2 or loads.shape[0] != len(layers) or not loads.size:
        return None
    is_valid = np.isfinite(loads).all() and all(type(layer) is int for layer in layers)
    return (layers, loads, event["iteration"]) if is_valid else None


def _cells(loads: Loads) -> Iterator[Path]:
    """One path per level, with a rectangle for each run of neighboring experts."""
    num_layers, num_experts = loads.shape
    width, height = SIZE / num_experts, SIZE / num_layers
    for _, low, high, color, strength in LEVELS:
        is_in = np.zeros((num_layers, num_experts + 2), dtype=bool)
        is_in[:, 1:-1] = (loads >= low) & (loads < high)
        rows, edges = np.nonzero(is_in[:, 1:] != is_in[:, :-1])
        d = "".join(
            f"M{first * width:.1f} {SIZE - (row + 1) * height:.1f}h{(end - first) * width:.1f}"
            f"v{height:.1f}h{(first - end) * width:.1f}Z"
            for row, first, end in zip(
                rows[::2].tolist(), edges[::2].tolist(), edges[1::2].tolist(), strict=True
            )
        )
        if d:
            yield Path(kind=strength, color=color, d=d)


def _layer_ticks(layers: Sequence[int]) -> Iterator[Tick]:
    step = -(-len(layers) // MAX_LAYER_TICKS)
    for row in range(0, len(layers), step):
        yield Tick(at=100 * (row + 0.5) / len(layers), text=str(layers[row]))


def _hover(loads: Loads) -> dict[str, Any]:
    """The median and the range over the layers, for each expert."""
    return {
        "label": "layers",
        "color": BLUE,
        "x": list(range(loads.shape[1])),
        "middle": rounded(np.median(loads, axis=0)),
        "middle_label": f"median of {len(loads)} layers",
        "low": rounded(loads.min(axis=0)),
        "high": rounded(loads.max(axis=0)),
    }
