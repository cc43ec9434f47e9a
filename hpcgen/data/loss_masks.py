"""Reading of loss masks: the mask of one chat, and the check of all bytes of a mask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcgen.errors import HpcgenError, Problem, problem_of
from trainer.contract.files import loss_mask
from trainer.contract.files.loss_mask import LEARNED
from trainer.contract.files.regular_file import open_regular


def open_mask(prefix: Path, num_tokens: int) -> NDArray[np.uint8] | None:
    """The mask of a pair with `num_tokens` tokens, memory-mapped; None if the pair has none.

    Raises:
        HpcgenError: the mask has another size.
    """
    if not loss_mask.has_mask(prefix):
        return None
    if (problem := loss_mask.size_problem(prefix, num_tokens)) is not None:
        raise HpcgenError(problem)
    path = loss_mask.mask_path(prefix)
    with open_regular(path) as file:
        return np.asarray(np.memmap(file, np.uint8, "r")) if num_tokens else np.empty(0, np.uint8)


class MaskScan:
    """Checks a mask while it is read."""

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        self.path = Path(loss_mask.mask_path(prefix))
        self.num_learned = 0
        self._position = 0
        self._finding: Problem | None = None

    def add(self, chunk: bytes) -> None:
        """Checks the next bytes."""
        values = np.frombuffer(chunk, np.uint8)
        self.num_learned += int(np.count_nonzero(values == LEARNED))
        wrong = np.flatnonzero(values > LEARNED)
        if len(wrong) and self._finding is None:
            at = int(wrong[0])
            reason = f"byte {self._position + at:,} is {values[at]}; a loss mask has only 0 and {LEARNED}"
            self._finding = problem_of(self.path, reason)
        self._position += len(values)

    def findings(self, num_tokens: int) -> Iterator[Problem]:
        """Yields what is wrong with the mask of a pair with `num_tokens` tokens. Call it after the last byte."""
        if (problem := loss_mask.size_problem(self._prefix, num_tokens)) is not None:
            yield problem
        if self._finding is not None:
            yield self._finding
