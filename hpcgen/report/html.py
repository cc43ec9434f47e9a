"""Shared parts of the HTML pages: tiles, tables, the values that charts show on hover, and the page around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from hpcgen.report.chart import Chart
from hpcgen.version import __version__

HERE = Path(__file__).parent
COLORS = 8
"""Number of line colors in page.css and page.js."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A figure at the top of the page."""

    title: str
    value: str
    unit: str = ""
    notes: tuple[str, ...] = ()
    share: float | None = None
    """Fraction to draw as a bar."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text; `note` describes omitted rows."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    is_open: bool = True


def rendered(template: str, *, charts: Sequence[Chart], **values: Any) -> str:
    """Renders a complete page. Its content security policy forbids all network requests."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(template).render(
        charts=charts, data=_hover_data(charts), version=__version__, color_class=_color_class, **values
    )
    return page.encode(errors="backslashreplace").decode()  # files of a run can have unpaired surrogates


def _hover_data(charts: Sequence[Chart]) -> dict[str, Any]:
    """Data for the script: the axis and values of each chart. Charts share the positions of their steps."""
    places: dict[tuple[Any, ...], int] = {}
    for chart in charts:
        for series in chart.hover["series"]:
            series["x"] = places.setdefault(tuple(series["x"]), len(places))
    return {"places": list(places), "charts": {chart.key: chart.hover for chart in charts}}


def _color_class(number: int) -> str:
    """CSS classes of a line. After the last color, colors repeat with dashes and then with dots."""
    dash = min(number // COLORS, 2)
    return f"c{number % COLORS}" + (f" d{dash}" if dash else "")
