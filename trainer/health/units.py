"""Sizes and rates as text."""

from __future__ import annotations


def size_text(size_bytes: int) -> str:
    """A size in the largest unit that divides it: 16 GiB, 64 MiB, 100 B."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def rate_text(rate: float) -> str:
    """A rate with one decimal place, or with three significant digits below 10: 471.2, 9.38, 0.0123."""
    return f"{rate:.1f}" if rate >= 10 else f"{rate:.3g}"
