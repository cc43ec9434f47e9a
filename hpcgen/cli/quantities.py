"""Types of options: numbers of nodes, durations, budgets and rows of a table."""

from __future__ import annotations

import re
from typing import Any

import click

OWN = "own"
"""The word for the run's own layout in place of a row."""
_UNITS = {"w": 7 * 86400, "d": 86400, "h": 3600, "m": 60}


class Nodes(click.ParamType[tuple[int, ...]]):
    """Numbers of nodes, separated by commas."""

    name = "nodes"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The numbers."""
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in value.split(",")]
        if not all(re.fullmatch(r"[1-9]\d{0,5}", word) for word in words):
            self.fail(f"{value!r} must be whole numbers from 1, such as 16 or 8,16,32", param, ctx)
        return tuple(int(word) for word in words)


class Deadline(click.ParamType[float]):
    """A duration in seconds, such as 14d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?) *([wdhm])", value.strip())
        seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
        if not seconds:
            self.fail(
                f"{value!r} must be weeks, days, hours or minutes, such as 2w, 14d, 36h or 90m", param, ctx
            )
        return seconds


class Budget(click.ParamType[tuple[float, bool]]):
    """An amount, and whether it is a number of GPU-hours."""

    name = "budget"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, bool]:
        """The amount."""
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(
            r"(\d[\d,_]*(?:\.\d+)?(?:e\+?\d{1,2})?) *(gpu-?h(?:ours)?)?", value.strip(), re.IGNORECASE
        )
        amount = float(re.sub("[,_]", "", found[1])) if found else 0.0
        if found is None or not amount:
            self.fail(
                f"{value!r} must be an amount above 0, such as 50000 or 5e4, or 50000GPUh for GPU-hours",
                param,
                ctx,
            )
        return amount, found[2] is not None


class Row(click.ParamType[str]):
    """A row of the table, or the run's own layout."""

    name = "row"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The row's name."""
        if value != OWN and not re.fullmatch(r"[1-9]\d{0,3}", value):
            self.fail(f"{value!r} must be a row of the table, such as 1, or {OWN}", param, ctx)
        return str(value)
