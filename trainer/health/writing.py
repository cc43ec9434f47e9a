"""Measures how fast all ranks together write to a directory, as they do when they save a checkpoint."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trainer.contract.errors import TrainerError
from trainer.health.meeting import Meeting

BLOCK_BYTES = 4 * 2**20
FIRST_BYTES = 64 * 2**20
"""Bytes that each rank writes first. Their time decides how much it writes for the measurement."""
DURATION_S = 10.0
"""Duration that the measurement aims at (seconds)."""
MAX_BYTES = {"cuda": 2 * 2**30, "cpu": FIRST_BYTES}
"""Maximum bytes per rank. 16 ranks write 32 GiB within the timeout of a step even at 0.2 GB/s, as after a burst buffer
that took the first bytes. Ranks on CPUs only try the path."""
FREE_SHARE = 10
"""The files of all ranks fill at most one tenth of the free space."""


@dataclass(frozen=True)
class Written:
    """Size and time of the file that one rank has written."""

    node: str
    num_bytes: int
    seconds: float


def measure_writes(
    directory: Path, meeting: Meeting, device: str, purpose: str, *, is_local: bool = False
) -> float:
    """Measure the bandwidth at which the ranks write a file each, with its sync, in GB/s.

    All ranks must call this at the same time; each gets the same result. For an `is_local` directory, which every node
    has of its own, it is the bandwidth of the slowest node.

    Raises:
        TrainerError: a rank cannot write.
    """
    mine = shutil.disk_usage(directory).free // FREE_SHARE // meeting.ranks.world_size
    free = min(meeting.gather(f"{purpose}: free space", mine))
    size = min(FIRST_BYTES, free)
    written = _write_all(directory, meeting, f"{purpose}: first bytes", size)
    slowest_s = max(each.seconds for each in written)
    larger = min(int(size * DURATION_S / slowest_s), MAX_BYTES[device], free)
    if larger > size:
        written = _write_all(directory, meeting, purpose, larger)
    if not is_local:
        return rate(written)
    nodes = {each.node for each in written}
    return min(rate([each for each in written if each.node == node]) for node in nodes)


def rate(written: Sequence[Written]) -> float:
    """Bandwidth in GB/s of ranks that wrote at the same time."""
    return sum(each.num_bytes for each in written) / max(each.seconds for each in written) / 1e9


def _write_all(directory: Path, meeting: Meeting, purpose: str, num_bytes: int) -> list[Written]:
    """Let every rank write `num_bytes`, and gather the times."""
    error = ""
    path = directory / f".write-rate-{meeting.ranks.rank}-{os.getpid()}"
    seconds = 0.0
    with meeting.step(purpose):
        meeting.gather(f"{purpose}: begin", None)
        try:
            with path.open("xb") as file:
                seconds = _write(file, num_bytes)
        except OSError as problem:
            error = f"{directory}: cannot write {num_bytes} bytes ({problem.strerror})"
        finally:
            path.unlink(missing_ok=True)
        found = meeting.gather(f"{purpose}: end", [error, [meeting.node, num_bytes, seconds]])
    if errors := [error for error, _ in found if error]:
        raise TrainerError(errors[0])
    return [Written(*each) for _, each in found]


def _write(file: BinaryIO, num_bytes: int) -> float:
    """Write and sync random bytes, which no file system compresses. Returns the seconds that it took."""
    block = os.urandom(min(BLOCK_BYTES, num_bytes))
    start = time.perf_counter()
    for begin in range(0, num_bytes, BLOCK_BYTES):
        file.write(block[: num_bytes - begin])
    file.flush()
    os.fsync(file.fileno())
    return time.perf_counter() - start
