"""Which inputs go to which outputs: the one rule that concat and prepare share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hpcgen.errors import HpcgenError


@dataclass(frozen=True)
class Share:
    """Consecutive inputs that feed consecutive outputs: many to one, or one to k.

    With k outputs, line n of the input (counted from 0) goes to output n mod k.
    """

    inputs: range
    outputs: range


def assign(sizes: Sequence[int | None], num_outputs: int) -> list[Share]:
    """Cuts inputs of `sizes` bytes, in their order, into contiguous runs of about equal bytes, one per output.

    With fewer inputs than outputs, the outputs are cut instead, in proportion to the inputs' bytes: each input
    feeds at least one. A size that is not known counts as the mean of the others. The result depends on
    nothing but the arguments.

    Raises:
        HpcgenError: there is no input.
    """
    if not sizes:
        raise HpcgenError("there is no file to make output files of")
    known = [size for size in sizes if size]
    usual = max(1, sum(known) // len(known)) if known else 1
    weights = [size or usual for size in sizes]
    if len(weights) >= num_outputs:
        bounds = _cut(weights, num_outputs)
        return [Share(range(*bounds[i : i + 2]), range(i, i + 1)) for i in range(num_outputs)]
    bounds = _spread(weights, num_outputs)
    return [Share(range(i, i + 1), range(*bounds[i : i + 2])) for i in range(len(weights))]


def _cut(weights: Sequence[int], parts: int) -> list[int]:
    """Where to cut `weights` into that many runs of about equal sums, none empty: parts + 1 bounds."""
    ends = list(accumulate(weights))
    bounds = [0]
    for part in range(1, parts):
        goal = ends[-1] * part  # over parts: whole numbers keep the cut the same on every machine
        index = bisect_left(ends, -(-goal // parts))
        # the end of this input, or of the one before, whichever is nearer
        if index and goal - ends[index - 1] * parts <= ends[index] * parts - goal:
            index -= 1
        bounds.append(min(max(index + 1, bounds[-1] + 1), len(weights) - (parts - part)))
    return [*bounds, len(weights)]


def _spread(weights: Sequence[int], parts: int) -> list[int]:
    """How many of that many parts each weight gets, in proportion, at least one: len(weights) + 1 bounds."""
    ends = list(accumulate(weights))
    bounds = [0]
    for index, end in enumerate(ends[:-1]):
        nearest = (2 * end * parts + ends[-1]) // (2 * ends[-1])
        bounds.append(min(max(nearest, bounds[-1] + 1), parts - (len(weights) - 1 - index)))
    return [*bounds, parts]
