"""Assignment of input files to output files, shared by concat and prepare."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from hpcgen.config.corpus import CorpusJob, num_outputs, output_names
from hpcgen.errors import HpcgenError

if TYPE_CHECKING:
    from hpcgen.data.listed_files import ManifestFile
    from hpcgen.data.manifest import Manifest


@dataclass(frozen=True)
class Share:
    """Consecutive inputs and the consecutive outputs made from them: many to one, or one to k.

    With k outputs, line n of the input (counted from 0) goes to output n mod k.
    """

    inputs: range
    outputs: range


def shares(job: CorpusJob, manifest: Manifest) -> Iterator[tuple[list[ManifestFile], list[str]]]:
    """Yields for each share of each split: its files, and the names of the outputs that are made from them.

    Raises:
        HpcgenError: the manifest has no file for a split of the configuration.
    """
    for split, count in num_outputs(job.corpus).items():
        files = manifest.of_split(split)
        if not files:
            raise HpcgenError(
                f"the manifest has no file in the split {split}",
                "correct data.corpus.splits, or run hpcgen data plan again",
                where=job.directory,
            )
        names = output_names(split, count)
        for share in assign([file.size for file in files], count):
            yield [files[index] for index in share.inputs], [names[index] for index in share.outputs]


def assign(sizes: Sequence[int | None], num_outputs: int) -> list[Share]:
    """Splits inputs of `sizes` bytes, in order, into contiguous groups of about equal size, one per output.

    With fewer inputs than outputs, the outputs are divided among the inputs instead, in proportion to the input sizes
    and at least one each. An unknown size counts as the mean of the others. The result depends only on the arguments.

    Raises:
        HpcgenError: there is no input.
    """
    if not sizes:
        raise HpcgenError("there are no input files to make output files from")
    known = [size for size in sizes if size]
    usual = max(1, sum(known) // len(known)) if known else 1
    weights = [size or usual for size in sizes]
    if len(weights) >= num_outputs:
        bounds = _cut(weights, num_outputs)
        return [Share(range(*bounds[i : i + 2]), range(i, i + 1)) for i in range(num_outputs)]
    bounds = _spread(weights, num_outputs)
    return [Share(range(i, i + 1), range(*bounds[i : i + 2])) for i in range(len(weights))]


def _cut(weights: Sequence[int], parts: int) -> list[int]:
    """Splits `weights` into `parts` non-empty groups of neighbors with about equal sums. Returns parts + 1 bounds."""
    ends = list(accumulate(weights))
    bounds = [0]
    for part in range(1, parts):
        goal = ends[-1] * part  # times parts: integers give the same cut on every machine
        index = bisect_left(ends, -(-goal // parts))
        # Cut at the end of this input or of the previous one, whichever is nearer.
        if index and goal - ends[index - 1] * parts <= ends[index] * parts - goal:
            index -= 1
        bounds.append(min(max(index + 1, bounds[-1] + 1), len(weights) - (parts - part)))
    return [*bounds, len(weights)]


def _spread(weights: Sequence[int], parts: int) -> list[int]:
    """Distributes `parts` over `weights` in proportion, at least one each. Returns len(weights) + 1 bounds."""
    ends = list(accumulate(weights))
    bounds = [0]
    for index, end in enumerate(ends[:-1]):
        nearest = (2 * end * parts + ends[-1]) // (2 * ends[-1])
        bounds.append(min(max(nearest, bounds[-1] + 1), parts - (len(weights) - 1 - index)))
    return [*bounds, parts]
