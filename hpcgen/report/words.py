"""Figures as people read them."""

from __future__ import annotations

from datetime import datetime, timezone

from hpcgen.report.scale import short

MISSING = "–"


def duration(seconds: float | None) -> str:
    """A time span: 0.25 s, 42 s, 5 min, 3 h 20 min, 2 d 4 h."""
    if seconds is None:
        return MISSING
    if seconds < 1e-4:
        return "0 s"
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def moment(unix_seconds: float | None) -> str:
    """A point in time, in UTC."""
    if unix_seconds is None:
        return MISSING
    return datetime.fromtimestamp(unix_seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def size(count: float | None) -> str:
    """Bytes: 15.7 GB."""
    if count is None:
        return MISSING
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.1f} {units[0]}"


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
