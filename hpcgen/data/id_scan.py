"""Checks of the ids in a .bin file: their range, and the last id of each sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcgen.data.pair import Pair
from hpcgen.errors import Problem, problem_of
from trainer.contract.files.index_header import bin_path


class IdScan:
    """Checks the ids of a .bin file, chunk by chunk."""

    def __init__(self, pair: Pair, vocab_size: int | None, eod_id: int | None) -> None:
        """Sequences must end with `eod_id`, unless it is None. `vocab_size` is None if unknown."""
        self.findings: list[Problem] = []
        self.largest: int | None = None
        self._pair = pair
        self._vocab_size = vocab_size
        self._eod_id = eod_id
        self._position = 0
        self._size = bin_path(pair.prefix).stat().st_size
        self._bad_id = self._bad_end = False

    def add(self, chunk: bytes) -> None:
        """Checks the next chunk, which must not split an id."""
        ids = np.frombuffer(chunk, self._pair.dtype)
        largest = int(ids.max())
        self.largest = largest if self.largest is None else max(self.largest, largest)
        limit = self._vocab_size
        if not self._bad_id and (int(ids.min()) < 0 or (limit is not None and largest >= limit)):
            self._bad_id = True
            wrong = (ids < 0) if limit is None else (ids < 0) | (ids >= limit)
            self._add_finding(
                ids, int(np.argmax(wrong)), "" if limit is None else f"valid ids are 0 to {limit - 1}"
            )
        if self._eod_id is not None and not self._bad_end:
            self._check_sequence_ends(ids, self._eod_id)
        self._position += len(chunk)

    def _check_sequence_ends(self, ids: NDArray[Any], eod: int) -> None:
        """Checks that sequences end with `eod`. A sequence ends where the next one starts or the file ends."""
        item, end = self._pair.dtype.itemsize, self._position + ids.nbytes
        first, last = np.searchsorted(self._pair.offsets, [self._position, end], side="right")
        ends = (self._pair.offsets[first:last] - self._position) // item - 1
        if end == self._size:
            ends = np.append(ends, len(ids) - 1)
        wrong = np.flatnonzero(ids[ends] != eod)
        if len(wrong):
            self._bad_end = True
            self._add_finding(
                ids, int(ends[wrong[0]]), f"the sequence should end with the end-of-document id {eod}"
            )

    def _add_finding(self, ids: NDArray[Any], index: int, why: str) -> None:
        pair, byte = self._pair, self._position + index * self._pair.dtype.itemsize
        sequence = int(np.searchsorted(pair.offsets, byte, side="right")) - 1
        document = int(np.searchsorted(pair.bounds, sequence, side="right")) - 1
        reason = f"id {ids[index]} at byte {byte:,}, in document {document:,}"
        self.findings.append(
            problem_of(bin_path(pair.prefix), reason + (f"; {why}" if why else " is negative"))
        )
