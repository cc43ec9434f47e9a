"""A sample of a corpus's files: spread evenly over each split, the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping

from hpcgen.errors import HpcgenError
from hpcgen.wording import counted


def sample_sizes(counts: Mapping[str, int], total: int) -> dict[str, int]:
    """How many of `total` files each split gives, in proportion to the files it has, at least one each.

    Raises:
        HpcgenError: there are more splits than files to take.
    """
    if total >= sum(counts.values()):
        return dict(counts)
    if total < len(counts):
        raise HpcgenError(
            f"a sample of {counted(total, 'file')} cannot have one of each of {', '.join(counts)}",
            f"use a data.corpus.sample_files of {len(counts)} or more, or a larger sample_fraction",
        )
    taken = dict.fromkeys(counts, 1)
    for _ in range(total - len(counts)):
        # the split that is furthest below its share (the method of Webster, as seats go to parties)
        open_splits = [split for split in counts if taken[split] < counts[split]]
        taken[min(open_splits, key=lambda split: (2 * taken[split] + 1) / counts[split])] += 1
    return taken


def evenly_spread(count: int, taken: int) -> list[int]:
    """`taken` of `count` indices: the middles of `taken` runs of about equal length."""
    return [(2 * index + 1) * count // (2 * taken) for index in range(taken)]
