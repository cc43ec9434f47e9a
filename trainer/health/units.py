"""Sizes and rates as text."""

from __future__ import annotations


def size_text(size_bytes: int) -> str:
    """16 GiB, 64 MiB, 100 B: a size in the largest unit that divides it."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def rate_text(rate: float) -> str:
    """471.2, 9.38, 0.0123: one place after the point, or three digits where that says too little."""
    return f"{rate:.1f}" if rate >= 10 else f"{rate:.3g}"
