"""Formatting of numbers, lists and names for people, and escaping of untrusted text."""

from __future__ import annotations

from collections.abc import Container, Sequence

from trainer.contract.spelling import did_you_mean, misspelled, nearest, short_for
from trainer.contract.wording import counted, duration, few, one_of, ranges

__all__ = [
    "apart",
    "between",
    "counted",
    "did_you_mean",
    "duration",
    "few",
    "harmless",
    "misspelled",
    "nearest",
    "one_of",
    "padded",
    "ranges",
    "rough",
    "scaled",
    "short_for",
    "size_text",
    "time_between",
]


def scaled(number: float) -> str:
    """A number of at most four digits with a decimal prefix: 999, 12.3 k, 4.5 M."""
    prefix = ""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 999.95 or prefix == "P":
            break
        number /= 1000
    return f"{number:.1f} {prefix}" if prefix else f"{number:.0f}"


def size_text(num_bytes: float) -> str:
    """A number of bytes with a decimal prefix: 0 B, 15.7 MB, 2.7 TB."""
    number, _, prefix = scaled(num_bytes).partition(" ")
    return f"{number} {prefix}B"


def between(low: float, high: float) -> str:
    """A range of two rough figures: 350,000 to 420,000, or "about 5.1" if both round to it."""
    first, last = rough(low), rough(high)
    return f"about {last}" if first == last else f"{first} to {last}"


def rough(number: float, digits: int = 2) -> str:
    """A number with few significant digits: 350,000, 5.1."""
    rounded = float(f"{number:.{digits}g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"


def apart(number: float, limit: float) -> str:
    """A number with three significant digits, or as many as show on which side of a limit it is: 124, 2,003,000."""
    if number == limit:
        return _plain(float(f"{number:.9g}"))
    shown = number
    for digits in range(3, 17):
        shown = float(f"{number:.{digits}g}")
        if (shown - limit) * (number - limit) > 0:
            break
    return _plain(shown)


def _plain(number: float) -> str:
    return f"{number:,.0f}" if number.is_integer() else f"{number:,}"


def time_between(low_s: float, high_s: float) -> str:
    """A range of durations in one unit: 26 to 32 days, 3.5 to 4.2 hours."""
    for unit, seconds in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if high_s >= 2 * seconds:
            return f"{between(low_s / seconds, high_s / seconds)} {unit}"
    return f"{between(low_s, high_s)} seconds"


def padded(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[list[str]]:
    """The cells of a table, with blanks up to the width of their columns. Columns in `right` end in line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


def printable(text: str) -> str:
    """Untrusted text with a question mark in place of each non-printable character."""
    return "".join(character if character.isprintable() else "?" for character in text)


def harmless(text: str, keep: str = "") -> str:
    """Escapes characters of untrusted text that could control the terminal or forge a line.

    These are control characters, line breaks, and marks that change the direction of text, except those in `keep`.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1]
        for character in text
    )
