"""Parses the output of NVIDIA's all_reduce_perf (https://github.com/NVIDIA/nccl-tests)."""

from __future__ import annotations

import re

from trainer.contract.errors import TrainerError
from trainer.health.bandwidth import Sample

_LABEL = r"^\s*(?:\d+:\s)?\s*"
"""Prefix that srun --label puts before each line: the task's number."""
_ROW = re.compile(
    _LABEL + r"(?P<size>\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+"
    r"\s+[\d.e+]+\s+[\d.]+\s+[\d.]+\s+\S+"  # out of place: time, algbw, busbw, wrong
    r"\s+(?P<time>[\d.e+]+)\s+(?P<algbw>[\d.]+)\s+(?P<busbw>[\d.]+)\s+(?P<wrong>\S+)\s*$",
    re.MULTILINE,
)
_RANK = re.compile(_LABEL + r"#\s+Rank\s+(\d+)\s", re.MULTILINE)


def parse(text: str, num_ranks: int) -> list[Sample]:
    """Parse the in-place figures of the table, smallest size first.

    Raises:
        TrainerError: there is no table, or each process only measured itself.
    """
    ranks = [int(rank) for rank in _RANK.findall(text)]
    if ranks and max(ranks) + 1 < num_ranks:
        raise TrainerError(
            f"all_reduce_perf ran over {max(ranks) + 1} of {num_ranks} ranks, so each process only measured itself. "
            "Build nccl-tests with MPI=1, and check srun --mpi=list"
        )
    samples = {}
    for row in _ROW.finditer(text):
        size = int(row["size"])
        samples[size] = Sample(
            size_bytes=size,
            time_s=float(row["time"]) / 1e6,
            algbw_gb_s=float(row["algbw"]),
            busbw_gb_s=float(row["busbw"]),
            correct=row["wrong"] in ("0", "N/A"),
        )
    if not samples:
        raise TrainerError("all_reduce_perf printed no table. Its output is in the job's log")
    return [samples[size] for size in sorted(samples)]
