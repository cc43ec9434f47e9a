"""Number formatting for display."""

from __future__ import annotations

from datetime import datetime, timezone

from hpcgen import text

MISSING = "–"


def duration(seconds: float | None) -> str:
    """Formats a duration: 0.25 s, 42 s, 3 h 20 min."""
    return MISSING if seconds is None else text.duration(seconds)


def compared_with_prediction(seconds: float | None, predicted: float | None) -> str:
    """Compares a time with the predicted one: "12% slower than the predicted 1.8 s". Empty if one is unknown."""
    if seconds is None or predicted is None:
        return ""
    difference = round(100 * (seconds / predicted - 1))
    if difference == 0:
        return "as predicted"
    return f"{abs(difference)}% {'slower' if difference > 0 else 'faster'} than the predicted {duration(predicted)}"


def moment(unix_seconds: float | None) -> str:
    """Formats a point in time in UTC."""
    if unix_seconds is None:
        return MISSING
    return datetime.fromtimestamp(unix_seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def size(num_bytes: float | None) -> str:
    """Formats a number of bytes: 15.7 GB."""
    return MISSING if num_bytes is None else text.size_text(num_bytes)


def figure(value: float | None, digits: int = 4) -> str:
    """Formats a number with `digits` significant digits, and with commas if it is large."""
    if value is None:
        return MISSING
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def count(value: float | None) -> str:
    """Formats an integer."""
    return MISSING if value is None else f"{value:,.0f}"


def count_in_short(value: float | None) -> str:
    """Formats an integer; ten million and more are abbreviated (12.5M)."""
    return count(value) if value is None or value < 1e7 else short(value)


def percent(share: float | None) -> str:
    """Formats a fraction as a percentage, with one decimal place if it is below 10% or above 99%."""
    if share is None:
        return MISSING
    return f"{share:.1%}" if share < 0.1 or share > 0.99 else f"{share:.0%}"


def short(value: float, digits: int = 4) -> str:
    """Formats a number briefly with at most `digits` significant digits: 12k, 1.5M, 0.25, 3e-5."""
    size = abs(value)
    if size < 1e-12:
        return "0"
    if size < 1e-3:
        return f"{value:.{digits - 2}g}".replace("e-0", "e-")
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            divisor = 1e3 if unit == "k" else limit
            return f"{value / divisor:.{digits}g}{unit}"
    return f"{value:,.0f}" if size >= 10 ** (digits - 1) else f"{value:.{digits}g}"
