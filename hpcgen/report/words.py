"""Figures as people read them."""

from __future__ import annotations

from datetime import datetime, timezone

from hpcgen import text
from hpcgen.report.scale import short

MISSING = "–"


def duration(seconds: float | None) -> str:
    """A span of time: 0.25 s, 42 s, 3 h 20 min."""
    return MISSING if seconds is None else text.duration(seconds)


def moment(unix_seconds: float | None) -> str:
    """A point in time, in UTC."""
    if unix_seconds is None:
        return MISSING
    return datetime.fromtimestamp(unix_seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def size(num_bytes: float | None) -> str:
    """A number of bytes: 15.7 GB."""
    return MISSING if num_bytes is None else text.size_text(num_bytes)


def figure(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits, and commas in large ones."""
    if value is None:
        return MISSING
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def count(value: float | None) -> str:
    """A whole number."""
    return MISSING if value is None else f"{value:,.0f}"


def count_in_short(value: float | None) -> str:
    """A whole number; from ten million on as 12.5M."""
    return count(value) if value is None or value < 1e7 else short(value)


def percent(share: float | None) -> str:
    """A share of one, with a digit more where it is small."""
    if share is None:
        return MISSING
    return f"{share:.1%}" if share < 0.1 or share > 0.99 else f"{share:.0%}"
