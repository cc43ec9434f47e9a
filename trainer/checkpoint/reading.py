"""Compares the files of a checkpoint with its record, on all ranks together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.contract import checkpoint_files
from trainer.contract.checkpoint_files import Checkpoint
from trainer.faults import storage

TURN_S = 2.0
"""Seconds that a rank reads before it asks how far the others are."""


def problems(checkpoint: Checkpoint, beat: Callable[[], None]) -> list[str]:
    """What is wrong with a checkpoint, on every rank; each looks at its share of the files.

    Names and sizes come first: a file that is cut short costs no reading of the others. `beat` is called as long as
    any rank gets on with its reading, so that a large checkpoint may take its time, and a storage that hangs may not.

    Raises:
        TrainerError: on all ranks, when a file that is there cannot be read.
    """
    if checkpoint.record is None:
        return checkpoint_files.problems(checkpoint, hashes=True)
    return file_problems(checkpoint.path, checkpoint.record["files"], beat)


def file_problems(path: Path, files: Mapping[str, Mapping[str, Any]], beat: Callable[[], None]) -> list[str]:
    """`problems` of `files` below `path`, which have their bytes and sha256 as a record lists them."""
    by_size = sorted(files, key=lambda name: (-files[name]["bytes"], name))
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    share = {name: files[name] for name in by_size[rank::world_size]}
    return _of_all_ranks(_Reading(path, share, hashes=False), beat) or _of_all_ranks(
        _Reading(path, share, hashes=True), beat
    )


class _Reading:
    """Looks at some files below `path`, in a thread."""

    def __init__(self, path: Path, share: Mapping[str, Mapping[str, Any]], *, hashes: bool) -> None:
        self.path, self._share, self._hashes = path, share, hashes
        self._counting = threading.Lock()
        self.num_bytes = 0
        """So many were read."""
        self.found: list[str] = []
        self.error: BaseException | None = None
        # A daemon: a rank that leaves does not wait for storage that hangs.
        self._thread = threading.Thread(target=self._run, name="checkpoint-reading", daemon=True)
        self._thread.start()

    def is_done_after(self, seconds: float) -> bool:
        """Whether all was looked at, or failed, within so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.found = checkpoint_files.file_problems(
                self.path, self._share, hashes=self._hashes, on_bytes=self._count
            )
        except BaseException as error:  # whatever it is, the other ranks must hear of it
            self.error = error

    def _count(self, num_bytes: int) -> None:
        with self._counting:
            self.num_bytes += num_bytes


def _of_all_ranks(reading: _Reading, beat: Callable[[], None]) -> list[str]:
    num_bytes = -1.0
    is_reading = True
    while is_reading:  # in turns, so that no collective waits for long, however much there is to read
        is_done = reading.is_done_after(TURN_S)
        is_reading, num_bytes_now = _sum(not is_done, reading.num_bytes)
        if num_bytes_now != num_bytes:
            beat()
        num_bytes = num_bytes_now
    verdicts: list[tuple[list[str], BaseException | None]] = [([], None)] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(verdicts, (reading.found, reading.error))
    for _, error in verdicts:
        if isinstance(error, OSError):
            raised = storage.refused(error, reading.path)
            raised.is_everywhere = True
            raise raised
        if error is not None:
            raise error
    return [problem for found, _ in verdicts for problem in found]


def _sum(is_reading: bool, num_bytes: int) -> tuple[bool, float]:
    """Whether any rank still reads, and what all have read."""
    said = torch.tensor([is_reading, num_bytes], dtype=torch.float64)
    said = said.to("cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
    torch.distributed.all_reduce(said)
    reading, total = said.tolist()
    return reading > 0, total
