"""What several runs are called beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcgen.report.run import Run

MOST_NAMED = 3
"""Runs that a heading names one by one."""


def labels(runs: Sequence[Run]) -> list[str]:
    """The name of each; where names are the same, the shortest ends of the paths that tell the directories apart.

    A directory that is given twice is numbered.
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
    """All of the names, or of many the first ones and how many more there are."""
    if len(names) <= MOST_NAMED:
        return " and ".join(names)
    return f"{', '.join(names[: MOST_NAMED - 1])} and {len(names) - MOST_NAMED + 1} others"


def _ends(directories: Sequence[Path], taken: set[str]) -> list[str]:
    """The ends of the paths, all of as many parts: the fewest that tell them apart, and from what is taken."""
    parts = [directory.resolve().parts for directory in directories]
    ends: list[str] = []
    for count in range(1, max(map(len, parts)) + 1):
        ends = [str(Path(*each[-count:])) for each in parts]
        if len(set(ends)) == len(set(parts)) and not taken & set(ends):
            break
    return ends
