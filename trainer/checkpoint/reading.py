"""Verifies the files of a checkpoint against its record. All ranks share the work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.contract.errors import Scope
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import Checkpoint
from trainer.contract.problem import Problem
from trainer.faults import storage

EXCHANGE_INTERVAL_S = 2.0
"""Interval at which the ranks exchange their progress (seconds)."""


def problems(checkpoint: Checkpoint, beat: Callable[[], None]) -> list[Problem]:
    """Problems of a checkpoint, on every rank. Each rank checks a share of the files.

    Names and sizes are checked first, so that a truncated file is found without reading the others. `beat` is called
    while any rank makes progress: reading a large checkpoint may take long, but hanging storage still times out.

    Raises:
        TrainerError: on all ranks, if a file exists but cannot be read.
    """
    if checkpoint.record is None:
        return checkpoint_files.problems(checkpoint, hashes=True)
    return list(file_problems(checkpoint.path, checkpoint.record["files"], beat).values())


def file_problems(
    path: Path, files: Mapping[str, Mapping[str, Any]], beat: Callable[[], None]
) -> dict[str, Problem]:
    """`problems` of `files` below `path`, by name. `files` has their size and hash, as in a record."""
    by_size = sorted(files, key=lambda name: (-files[name]["bytes"], name))
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    share = {name: files[name] for name in by_size[rank::world_size]}
    return _gather_problems(_Reading(path, share, hashes=False), beat) or _gather_problems(
        _Reading(path, share, hashes=True), beat
    )


class _Reading:
    """Checks some files below `path` in a thread."""

    def __init__(self, path: Path, share: Mapping[str, Mapping[str, Any]], *, hashes: bool) -> None:
        self.path, self._share, self._hashes = path, share, hashes
        self._counting = threading.Lock()
        self.num_bytes = 0
        """Number of bytes read so far."""
        self.found: dict[str, Problem] = {}
        self.error: BaseException | None = None
        # A daemon thread, so that a rank that leaves does not wait for hanging storage.
        self._thread = threading.Thread(target=self._run, name="checkpoint-reading", daemon=True)
        self._thread.start()

    def is_done_after(self, seconds: float) -> bool:
        """True if the thread has finished or failed after waiting for at most `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.found = checkpoint_files.file_problems(
                self.path, self._share, hashes=self._hashes, on_bytes=self._count
            )
        except BaseException as error:  # the other ranks must learn of any error
            self.error = error

    def _count(self, num_bytes: int) -> None:
        with self._counting:
            self.num_bytes += num_bytes


def _gather_problems(reading: _Reading, beat: Callable[[], None]) -> dict[str, Problem]:
    num_bytes = -1.0
    is_reading = True
    while is_reading:  # in short turns, so that no collective waits for long
        is_done = reading.is_done_after(EXCHANGE_INTERVAL_S)
        is_reading, num_bytes_now = _sum(not is_done, reading.num_bytes)
        if num_bytes_now != num_bytes:
            beat()
        num_bytes = num_bytes_now
    verdicts: list[tuple[dict[str, Problem], BaseException | None]] = [
        ({}, None)
    ] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(verdicts, (reading.found, reading.error))
    for _, error in verdicts:
        if isinstance(error, OSError):
            raise storage.storage_error(error, reading.path, scope=Scope.ALL_RANKS)
        if error is not None:
            raise error
    return {name: problem for found, _ in verdicts for name, problem in found.items()}


def _sum(is_reading: bool, num_bytes: int) -> tuple[bool, float]:
    """Return True if any rank is still reading, and the total number of bytes that all ranks have read."""
    sums = torch.tensor([is_reading, num_bytes], dtype=torch.float64)
    sums = sums.to("cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
    torch.distributed.all_reduce(sums)
    reading, total = sums.tolist()
    return reading > 0, total
