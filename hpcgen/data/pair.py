"""Reading of published .bin/.idx pairs: arrays, documents, and prefixes as users type them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcgen.data.indexed_dataset import read_counts
from hpcgen.data.record import RECORD_FILE, SIDE_FILE
from hpcgen.errors import HpcgenError, Problem, problem_of
from hpcgen.text import counted
from trainer.contract.files.index_header import HEADER_SIZE, SUFFIXES, bin_path, idx_path
from trainer.contract.files.regular_file import open_regular

_CHUNK = 1024 * 1024
"""Sequences or documents to check at once, which bounds the memory."""


@dataclass(frozen=True)
class Pair:
    """The index of a pair as memory-mapped arrays. Ids are read on demand.

    S is the number of sequences, D the number of documents. A document has any number of sequences: one or none if
    hpcgen made the pair, and one per sentence if Megatron-LM split sentences.
    """

    prefix: Path
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    """[S] tokens in each sequence."""
    offsets: NDArray[np.int64]
    """[S] offset of each sequence in the .bin file, in bytes."""
    bounds: NDArray[np.int64]
    """[D + 1] document d consists of sequences bounds[d] to bounds[d + 1] (exclusive)."""

    @property
    def num_documents(self) -> int:
        """Number of documents (D)."""
        return len(self.bounds) - 1

    def document_lengths(self) -> NDArray[np.int64]:
        """[D] tokens in each document."""
        ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])  # [S + 1]
        return np.diff(ends[self.bounds])

    def document(self, number: int) -> NDArray[Any]:
        """Reads the ids of document `number`, its sequences end to end.

        Raises:
            HpcgenError: there is no such document, or the .bin file is shorter than the index requires.
        """
        if not 0 <= number < self.num_documents:
            raise HpcgenError(
                f"{self.prefix}: there is no document {number}",
                f"the pair has {counted(self.num_documents, 'document')}",
            )
        sequences = range(int(self.bounds[number]), int(self.bounds[number + 1]))
        with open_regular(bin_path(self.prefix)) as file:
            parts = [self._sequence(file, index) for index in sequences]
        return np.concatenate([np.empty(0, self.dtype), *parts])

    def last_token(self, number: int) -> int | None:
        """Reads the last ID of document `number`; None if the document has no tokens."""
        filled = [
            index
            for index in range(int(self.bounds[number]), int(self.bounds[number + 1]))
            if self.lengths[index]
        ]
        if not filled:
            return None
        end = int(self.offsets[filled[-1]]) + int(self.lengths[filled[-1]]) * self.dtype.itemsize
        with open_regular(bin_path(self.prefix)) as file:
            file.seek(end - self.dtype.itemsize)
            return int(np.frombuffer(file.read(self.dtype.itemsize), self.dtype)[0])

    def _sequence(self, file: Any, index: int) -> NDArray[Any]:
        file.seek(int(self.offsets[index]))
        raw = file.read(int(self.lengths[index]) * self.dtype.itemsize)
        if len(raw) != int(self.lengths[index]) * self.dtype.itemsize:
            raise HpcgenError(
                f"the file ends within sequence {index}", "tokenize again", where=bin_path(self.prefix)
            )
        return np.frombuffer(raw, self.dtype)

    def faults(self) -> Iterator[Problem]:
        """Yields the first error of each kind in the index. `open_pair` has already checked its header and its end."""
        index = idx_path(self.prefix)
        size, needed = index.stat().st_size, HEADER_SIZE + 12 * len(self.lengths) + 8 * len(self.bounds)
        # Megatron may append a mode (1 byte) per sequence.
        if size not in (needed, needed + len(self.lengths)):
            yield problem_of(index, f"the size is {size:,} bytes, but its header requires {needed:,}")
        yield from self._sequence_faults()
        if self.bounds[0] != 0 or self.bounds[-1] != len(self.lengths):
            span = f"documents span the sequences {self.bounds[0]:,} to {self.bounds[-1]:,}"
            yield problem_of(index, f"{span}, but the index has 0 to {len(self.lengths):,}")
        for start in range(0, self.num_documents, _CHUNK):
            part = self.bounds[start : start + _CHUNK + 1]
            wrong = np.flatnonzero(part[1:] < part[:-1])
            if len(wrong):
                number = start + int(wrong[0])
                reason = f"document {number:,} ends at sequence {self.bounds[number + 1]:,}, before its start"
                yield problem_of(index, reason)
                return

    def _sequence_faults(self) -> Iterator[Problem]:
        """Yields the first sequence that does not start where the previous one ends."""
        end = 0
        for start in range(0, len(self.lengths), _CHUNK):
            lengths = self.lengths[start : start + _CHUNK].astype(np.int64)
            ends = end + np.cumsum(lengths) * self.dtype.itemsize
            begins = np.concatenate([[end], ends[:-1]])
            wrong = np.flatnonzero((self.offsets[start : start + _CHUNK] != begins) | (lengths < 0))
            if len(wrong):
                number = start + int(wrong[0])
                yield problem_of(
                    idx_path(self.prefix),
                    f"sequence {number:,} ({counted(int(self.lengths[number]), 'token')}) starts at byte "
                    f"{self.offsets[number]:,}, but the previous one ends at {begins[wrong[0]]:,}",
                )
                return
            end = int(ends[-1])


def open_pair(prefix: Path) -> Pair:
    """Opens the pair at `prefix` and checks its header and sizes.

    Raises:
        HpcgenError: a file is missing, is not an index, or the sizes do not match.
    """
    counts = read_counts(prefix)
    index = idx_path(prefix)
    after_lengths = HEADER_SIZE + 4 * counts.sequences
    after_offsets = after_lengths + 8 * counts.sequences

    def array(dtype: str, offset: int, count: int) -> NDArray[Any]:
        if not count:
            return np.empty(0, dtype)
        return np.asarray(np.memmap(index, dtype, "r", offset, (count,)))

    return Pair(
        prefix=prefix,
        dtype=np.dtype(counts.dtype).newbyteorder("<"),
        lengths=array("<i4", HEADER_SIZE, counts.sequences),
        offsets=array("<i8", after_lengths, counts.sequences),
        bounds=array("<i8", after_offsets, counts.documents + 1),
    )


def as_prefix(path: Path) -> Path:
    """Removes .bin or .idx from a path, because users and shell globs pass the names of files."""
    for suffix in SUFFIXES:
        if path.name.endswith(suffix) and not idx_path(path).exists():
            return path.with_name(path.name.removesuffix(suffix))
    return path


def as_prefixes(paths: Iterable[Path]) -> list[Path]:
    """Prefixes of `paths` in order, without duplicates. Ignores records and side files."""
    others = (RECORD_FILE, SIDE_FILE)
    return list(dict.fromkeys(as_prefix(path) for path in paths if not path.name.endswith(others)))
