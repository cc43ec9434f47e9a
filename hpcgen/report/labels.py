"""Labels that distinguish several runs in one report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcgen.report.run import Run

MAX_NAMED = 3
"""Maximum number of runs that a heading lists by name."""


def labels(runs: Sequence[Run]) -> list[str]:
    """Name of each run. Runs with the same name get the shortest path suffixes that distinguish their directories.

    A directory that is given twice gets a number.
    """
    names = [run.name for run in runs]
    found = list(names)
    for name in dict.fromkeys(names):
        same = [number for number, each in enumerate(names) if each == name]
        if len(same) > 1:
            others = {each for each in names if each != name}
            ends = _ends([runs[number].directory for number in same], others)
            for number, end in zip(same, ends, strict=True):
                found[number] = end
    return [
        f"{label} ({number})" if found.count(label) > 1 else label for number, label in enumerate(found, 1)
    ]


def heading(names: Sequence[str]) -> str:
    """Joins the names. If there are many, lists the first ones and the number of others."""
    if len(names) <= MAX_NAMED:
        return " and ".join(names)
    return f"{', '.join(names[: MAX_NAMED - 1])} and {len(names) - MAX_NAMED + 1} others"


def _ends(directories: Sequence[Path], taken: set[str]) -> list[str]:
    """Path suffixes of equal length: the shortest that differ from each other and from `taken`."""
    parts = [directory.resolve().parts for directory in directories]
    ends: list[str] = []
    for count in range(1, max(map(len, parts)) + 1):
        ends = [str(Path(*each[-count:])) for each in parts]
        if len(set(ends)) == len(set(parts)) and not taken & set(ends):
            break
    return ends
