"""Chats in samples, computed from the lengths of the chats and their loss mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from trainer.packing.best_fit import best_fit_decreasing
from trainer.packing.counts import Counts

CHUNK = 2**22
"""Number of tokens whose mask is read at a time."""


@dataclass(frozen=True)
class ChatSamples:
    """The samples of an epoch."""

    chats: NDArray[numpy.int64]
    """Number of each chat and its number of kept tokens, in the order of the samples [chats, 2]."""
    bins: NDArray[numpy.int64]
    """First chat of each sample, and the end [samples + 1]."""
    counts: Counts

    def __len__(self) -> int:
        return len(self.bins) - 1


def pack_chats(
    lengths: NDArray[Any], mask: NDArray[numpy.uint8], seq_length: int, *, packed: bool
) -> ChatSamples:
    """Pack chats of `lengths` [chats], which follow each other in `mask` [tokens], into samples of `seq_length` inputs.

    Without `packed`, each chat has a sample of its own.

    Raises:
        ValueError: the mask has a value that is neither 0 nor 1.
    """
    kept, learned = (
        numpy.concatenate(parts) for parts in zip(*_kept_in_chunks(lengths, mask, seq_length), strict=True)
    )
    is_read, is_long = kept > 0, lengths > seq_length + 1
    numbers = numpy.flatnonzero(is_read)
    sizes = kept[numbers] - 1
    if packed:
        order, bins = best_fit_decreasing(sizes, seq_length)
    else:
        order, bins = numpy.arange(len(numbers)), numpy.arange(len(numbers) + 1)
    counts = Counts(
        chats=len(lengths),
        cut=int((is_read & is_long).sum()),
        too_long=int((~is_read & is_long).sum()),
        unanswered=int((~is_read & ~is_long).sum()),
        tokens=int(sizes.sum()),
        learned=int(learned.sum()),
    )
    return ChatSamples(numpy.stack([numbers[order], kept[numbers][order]], axis=1), bins, counts)


def kept_tokens(
    lengths: NDArray[Any], mask: NDArray[numpy.uint8], seq_length: int
) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
    """How many tokens of each chat a sample can hold, and how many of their labels are learned: [chats] each.

    The chats of `lengths` [chats] follow each other in `mask` [tokens], whose values are 0 and 1. A chat that is left
    out has 0 of both: it has nothing to learn, or no answer that ends within seq_length + 1 tokens.
    """
    ends = numpy.cumsum(lengths, dtype=numpy.int64)
    starts = ends - lengths
    kept = lengths.astype(numpy.int64)
    long = kept > seq_length + 1
    if long.any():
        # the first token after each answer
        after = numpy.flatnonzero(mask[:-1] > mask[1:]) + 1
        latest = numpy.searchsorted(after, starts[long] + seq_length + 1, side="right") - 1
        last = after[latest] if len(after) else numpy.zeros_like(latest)
        kept[long] = numpy.where(latest >= 0, numpy.maximum(last - starts[long], 0), 0)
    learned = numpy.zeros_like(kept)
    has_labels = kept >= 2
    first = starts[has_labels]
    # labels, then what follows up to the next chat; numpy sums up to each bound, and up to the end after the last one
    bounds = numpy.stack([first + 1, first + kept[has_labels]], axis=1).ravel()
    bounds = bounds[bounds < len(mask)]
    if len(bounds):
        learned[has_labels] = numpy.add.reduceat(mask, bounds, dtype=numpy.int64)[::2]
    return numpy.where(learned > 0, kept, 0), learned


def _kept_in_chunks(
    lengths: NDArray[Any], mask: NDArray[numpy.uint8], seq_length: int
) -> Iterator[tuple[NDArray[numpy.int64], NDArray[numpy.int64]]]:
    """Yields the `kept_tokens` of some chats at a time."""
    ends = numpy.cumsum(lengths, dtype=numpy.int64)
    first = start = 0
    while first < len(lengths):
        end = max(first + 1, int(numpy.searchsorted(ends, start + CHUNK, side="right")))
        chunk = numpy.asarray(mask[start : ends[end - 1]])
        if len(chunk) and chunk.max() > 1:
            raise ValueError(f"has the value {chunk.max()}; a loss mask has only 0 and 1")
        yield kept_tokens(lengths[first:end], chunk, seq_length)
        first, start = end, int(ends[end - 1])
