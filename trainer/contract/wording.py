"""Formats counts, durations, sizes, rates and number ranges for people. hpcgen.text reexports some."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

ASKED_TO_STOP = "asked to stop"
"""Beginning of the reason of a training that was asked to stop. Other reasons are errors."""

STOPPED_EARLY = "stopped early"
"""Beginning of the third line of DONE if the run ended before its last iteration (training.early_stopping)."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 200
_REPR.maxdict = 20


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun: 1 file, 59,166 files. `plural` is for nouns with an irregular plural."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    """A duration in at most its two largest units: 0.25 s, 42 s, 2 min 9 s, 5 min, 3 h 20 min, 2 d 4 h."""
    if seconds < 9.95:
        return f"{seconds:.2g} s" if seconds >= 1e-4 else "0 s"
    rounded = round(seconds)
    for unit, name, smaller, smaller_name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if rounded >= unit:
            rest = rounded % unit // smaller
            return f"{rounded // unit} {name}" + (f" {rest} {smaller_name}" if rest else "")
    return f"{rounded} s"


def binary_size(size_bytes: int) -> str:
    """A size in the largest unit that divides it: 16 GiB, 64 MiB, 100 B."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def rate_text(rate: float) -> str:
    """A rate with one decimal place, or with three significant digits below 10: 471.2, 9.38, 0.0123."""
    return f"{rate:.1f}" if rate >= 10 else f"{rate:.3g}"


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as ranges: 0-2,5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks with their noun: rank 3, ranks 0-2,5."""
    return f"rank{'' if len(ranks) == 1 else 's'} {ranges(ranks)}"


def few(texts: Sequence[str], shown: int = 3, *, separator: str = ",") -> str:
    """The first of many texts: "a, b, c and 12 more", or with `separator` ";": "a; b; c; and 12 more"."""
    rest = len(texts) - shown
    end = " and" if separator == "," else f"{separator} and"
    return f"{separator} ".join(texts[:shown]) + (f"{end} {rest:,} more" if rest > 0 else "")


def one_of(choices: Sequence[str]) -> str:
    """A list of alternatives: a, b or c."""
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def shown(value: Any) -> str:
    """A value as Python writes it, shortened if it is long or deeply nested."""
    return _REPR.repr(value)
