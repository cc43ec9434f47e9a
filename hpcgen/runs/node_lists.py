"""Slurm's lists of nodes, such as gpu-[001-003,7],login. A list from a file of a run can be anything."""

from __future__ import annotations

import itertools
import math
import re

_MOST_NODES = 100_000
"""Others may have written a list that stands for more."""


def node_names(nodes: str) -> set[str]:
    """The names in a list, which may also be separated by blanks: gpu-1 gpu-2."""
    names: set[str] = set()
    for part in re.findall(r"(?:[^,\s\[]|\[[^\]]*\])+", nodes):
        names |= set(_expanded(part))
        if len(names) > _MOST_NODES:
            break
    return names


def _expanded(part: str) -> list[str]:
    """The names of one part: a name with any number of ranges in brackets. None if they are more than a cluster has."""
    names = re.split(r"\[([^\]]*)\]", part)  # every second piece was in brackets
    ranges = [_numbers(each) for each in names[1::2]]
    if math.prod(map(len, ranges)) > _MOST_NODES:
        return []
    return [
        "".join(itertools.chain(*zip(names[::2], numbers, strict=False), names[-1:]))
        for numbers in itertools.product(*ranges)
    ]


def _numbers(ranges: str) -> list[str]:
    """The numbers of ranges such as 001-003,7. None if one is not a number, or if they are more than a cluster has."""
    numbers: list[str] = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal()):
            return []
        if int(last) - int(first) + len(numbers) >= _MOST_NODES:
            return []
        numbers += (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers
