"""Draws series of numbers as SVG paths in a square of 1000 by 1000, which the page stretches to the chart's size.

No script is needed to fit a chart to the page. Labels are HTML, so they are not stretched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from hpcgen.report.downsample import Buckets
from hpcgen.report.scale import Scale, scale_for, tick_texts
from hpcgen.report.words import short
from hpcgen.runs.history import Column
from hpcgen.text import few

SIZE = 1000
MAX_MARKS = 200
"""Maximum number of vertical lines, or of marks for skipped steps; more would be a gray area."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One quantity of one run in a chart. `color` is the index of a color of the page."""

    label: str
    color: int
    x: Column
    low: Column
    high: Column
    middle: Column
    kind: Literal["line", "dots", "area"] = "line"
    middle_label: str = ""
    """Description of the middle, such as that of a smoothed line; empty if low and high are about it."""

    @classmethod
    def line(cls, label: str, color: int, buckets: Buckets, *, smooth: bool) -> Series:
        """Medians (with `smooth` and enough steps) or values, drawn over a thin line or a band of extremes."""
        is_smooth = smooth and buckets.window > 1
        values = np.where(np.isfinite(buckets.last), buckets.last, (buckets.low + buckets.high) / 2)
        return cls(
            label=label,
            color=color,
            x=buckets.x,
            low=buckets.low,
            high=buckets.high,
            middle=buckets.middle if is_smooth else values,
            middle_label=f"median of {buckets.window:,} steps" if is_smooth else "",
        )

    @classmethod
    def dots(cls, label: str, color: int, x: Column, y: Column, error: Column | float = 0.0) -> Series:
        """Single values, joined by a dashed line, with a band of their errors."""
        return cls(label=label, color=color, x=x, low=y - error, high=y + error, middle=y, kind="dots")

    @classmethod
    def area(cls, label: str, color: int, x: Column, low: Column, high: Column) -> Series:
        """Area between two lines; its value is the difference."""
        return cls(label=label, color=color, x=x, low=low, high=high, middle=high - low, kind="area")


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Position on an axis, in percent from the left or from the bottom."""

    at: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Path:
    """One SVG path with its CSS class."""

    kind: Literal["band", "raw", "smooth", "dots", "link", "area", "mark", "faint", "strong"]
    color: int
    d: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawn chart."""

    key: str
    title: str
    unit: str
    note: str
    summary: str
    """Text for screen readers."""
    paths: tuple[Path, ...]
    legend: tuple[tuple[str, int, str], ...]
    """Label, color, and kind (line, dots, area, faint or strong)."""
    x_unit: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    right_ticks: tuple[Tick, ...]
    verticals: tuple[Tick, ...]
    hover: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Style:
    """Appearance of a chart and its axes."""

    unit: str
    x_unit: str = "iteration"
    note: str = ""
    from_zero: bool = False
    log_from: float = float("inf")
    """Minimum ratio of the largest to the smallest value for a logarithmic axis."""
    cuts_outliers: bool = False
    """True if the axis range covers only the smoothed lines, so that a few steps may be outside."""
    right: Callable[[float], str] | None = None
    """Formats the values for a second axis on the right."""
    x_values: Sequence[int] = ()
    """Values to write at the x axis. Default: round ones."""
    verticals: Sequence[tuple[int, str]] = ()
    """Places of vertical lines, such as iterations at which attempts started, with a text for each."""
    skipped: Column = field(default_factory=lambda: np.array([]))
    """Iterations whose update was skipped."""


def draw(key: str, title: str, series: Sequence[Series], x_scale: Scale, style: Style) -> Chart | None:
    """Draws a chart; None if no series has a number to show."""
    values = (
        np.concatenate([np.concatenate([each.low, each.high]) for each in series]) if series else np.array([])
    )
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if style.cuts_outliers:
        low, high = _usual_range(series, low, high)
    scale = scale_for(low, high, from_zero=style.from_zero, log_from=style.log_from)
    y_ticks = scale.ticks()
    return Chart(
        key=key,
        title=title,
        unit=f"{style.unit}, log scale" if scale.is_log else style.unit,
        note="; ".join(filter(None, (style.note, _cut_off(values, scale)))),
        summary=f"{title}: from {short(low)} to {short(high)} {style.unit}",
        paths=(
            *(path for each in series for path in _paths(each, x_scale, scale) if path.d),
            *_marks(style.skipped, x_scale),
        ),
        legend=tuple(_legend(series)),
        x_unit=style.x_unit,
        x_ticks=tuple(Tick(at=100 * x_scale.place(x), text=f"{x:,}") for x in style.x_values)
        or whole_ticks(x_scale),
        y_ticks=_ticks(scale, y_ticks),
        right_ticks=tuple(Tick(at=100 * scale.place(y), text=style.right(y)) for y in y_ticks)
        if style.right
        else (),
        verticals=tuple(_verticals(style.verticals, x_scale)),
        hover={
            "low": x_scale.low,
            "high": x_scale.high,
            "unit": style.unit,
            "x_unit": style.x_unit,
            "is_log": x_scale.is_log,
            "series": [_hover(each) for each in series],
        },
    )


def whole_ticks(scale: Scale) -> tuple[Tick, ...]:
    """The ticks of an axis of whole numbers."""
    return _ticks(scale, [x for x in scale.ticks() if _is_whole(x)])


def _ticks(scale: Scale, values: Sequence[float]) -> tuple[Tick, ...]:
    texts = tick_texts(values)
    return tuple(
        Tick(at=100 * scale.place(value), text=text) for value, text in zip(values, texts, strict=True)
    )


def _usual_range(series: Sequence[Series], low: float, high: float) -> tuple[float, float]:
    """Range of the smoothed lines plus the usual deviation of the steps, within low and high."""
    lows, highs = [], []
    for each in series:
        middle = each.middle[np.isfinite(each.middle)]
        if not len(middle):
            continue
        away = np.concatenate([each.high - each.middle, each.middle - each.low])
        air = 1.5 * float(np.percentile(away[np.isfinite(away)], 90))
        lows.append(float(middle.min()) - air)
        highs.append(float(middle.max()) + air)
    return max(low, min(lows)), min(high, max(highs))


def _cut_off(values: Column, scale: Scale) -> str:
    beyond = values.max() > scale.high or values.min() < scale.low
    return "some steps are outside this chart" if beyond else ""


def _legend(series: Sequence[Series]) -> Iterator[tuple[str, int, str]]:
    """Legend entries. The smoothing is described only if the chart has a single line."""
    is_one = sum(each.kind == "line" for each in series) == 1
    for each in series:
        label = f"{each.label}, {each.middle_label}" if each.middle_label and is_one else each.label
        yield label, each.color, each.kind


def _paths(series: Series, x_scale: Scale, y_scale: Scale) -> Iterator[Path]:
    x = x_scale.places(series.x) * SIZE
    low, high, middle = ((1 - y_scale.places(y)) * SIZE for y in (series.low, series.high, series.middle))
    if series.kind == "area":
        yield Path(kind="area", color=series.color, d=_band(x, low, high))
        return
    has_range = bool(np.any(series.high > series.low))
    if series.kind == "dots":
        if has_range:
            yield Path(kind="band", color=series.color, d=_band(x, low, high))
        yield Path(kind="link", color=series.color, d=_line(x, middle))
        yield Path(kind="dots", color=series.color, d=_dots(x, middle))
        return
    if has_range:
        yield Path(kind="band", color=series.color, d=_band(x, low, high))
    elif series.middle_label:
        yield Path(kind="raw", color=series.color, d=_line(x, high))
    yield Path(kind="smooth", color=series.color, d=_line(x, middle))
    yield Path(kind="dots", color=series.color, d=_lone_dots(x, middle))


def _marks(x: Column, x_scale: Scale) -> Iterator[Path]:
    """Short marks at the bottom, without those that would overlap."""
    places = np.unique(np.round(x_scale.places(x) * MAX_MARKS)) * SIZE / MAX_MARKS
    if len(places := places[(places >= 0) & (places <= SIZE)]):
        yield Path(kind="mark", color=0, d="".join(f"M{_n(place)} {SIZE}v-40" for place in places))


def _verticals(verticals: Sequence[tuple[int, str]], x_scale: Scale) -> Iterator[Tick]:
    seen: dict[int, list[str]] = {}
    for x, text in verticals:
        if x_scale.low <= x <= x_scale.high:
            seen.setdefault(round(x_scale.place(x) * MAX_MARKS), []).append(text)
    for place, texts in seen.items():
        yield Tick(at=100 * place / MAX_MARKS, text=few(texts, 1))


def _hover(series: Series) -> dict[str, Any]:
    values: dict[str, Any] = {"label": series.label, "color": series.color, "x": rounded(series.x, 12)}
    values["middle"] = rounded(series.middle)
    if series.middle_label:
        values["middle_label"] = series.middle_label
    is_about = series.kind == "dots" and not series.middle_label
    if is_about and np.any(series.high > series.low):
        values["error"] = rounded(series.high - series.middle, 2)
    if (
        series.kind != "area"
        and not is_about
        and np.any((series.low < series.middle) | (series.middle < series.high))
    ):
        values["low"] = rounded(series.low)
        if np.any(series.low < series.high):
            values["high"] = rounded(series.high)
    return values


def rounded(values: Column, digits: int = 5) -> list[float | int | None]:
    """Rounds numbers for the page; gaps become null."""
    rounded = (float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist())
    return [int(value) if value is not None and value == int(value) else value for value in rounded]


def _line(x: Column, y: Column) -> str:
    return "".join(
        "M" + "L".join(f"{_n(x[index])} {_n(y[index])}" for index in range(first, end))
        for first, end in _stretches(y)
        if end - first > 1
    )


def _lone_dots(x: Column, y: Column) -> str:
    """Dots for single points between gaps, which have no line."""
    return "".join(_dot(x[first], y[first]) for first, end in _stretches(y) if end - first == 1)


def _band(x: Column, low: Column, high: Column) -> str:
    there_and_back = (
        [
            *((x[index], high[index]) for index in range(first, end)),
            *((x[index], low[index]) for index in reversed(range(first, end))),
        ]
        for first, end in _stretches(high + low)
    )
    return "".join("M" + "L".join(f"{_n(a)} {_n(b)}" for a, b in points) + "Z" for points in there_and_back)


def _dots(x: Column, y: Column) -> str:
    return "".join(_dot(a, b) for a, b in zip(x, y, strict=True) if np.isfinite(b))


def _dot(x: float, y: float) -> str:
    """A line of zero length, whose round caps stay a dot however the chart is stretched."""
    return f"M{_n(x)} {_n(y)}h0"


def _stretches(y: Column) -> Iterator[tuple[int, int]]:
    """Yields the start and end index of each stretch without a gap."""
    is_number = np.concatenate([[False], np.isfinite(y), [False]])
    changes = np.flatnonzero(is_number[1:] != is_number[:-1])
    yield from zip(changes[::2].tolist(), changes[1::2].tolist(), strict=True)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _is_whole(value: float) -> bool:
    return abs(value - round(value)) < 1e-6
