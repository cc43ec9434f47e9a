"""Counts and lists in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """1 file, 59,166 files."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def few(texts: Sequence[str], shown: int = 3) -> str:
    """The first of many texts: "a, b, c and 12 more"."""
    rest = len(texts) - shown
    return ", ".join(texts[:shown]) + (f" and {rest:,} more" if rest > 0 else "")
