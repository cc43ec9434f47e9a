"""torch's flight records: the last collectives of each rank, which show where ranks stopped to match."""

from __future__ import annotations

import os
import pickle

import torch

from trainer.contract.files.run_directory import RunDirectory, open_nofollow

FLIGHT_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
"""torch's functions that dump the collectives of NCCL, and of any backend (since 2.9)."""

RENAMED = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
}
"""Variables that all versions of torch read -> their names since torch 2.9, which warns about the old ones."""


def keep(run: RunDirectory) -> None:
    """Make torch record the last collectives of this rank. Call it before creating process groups.

    If the watch of this package fails, NCCL's watchdog writes them to the same place as `write`. Variables that are
    set in the environment take precedence.
    """
    defaults = ("2000", f"{run.stacks}/{RunDirectory.FLIGHT_RECORD}")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    for (older, newer), default in zip(RENAMED.items(), defaults, strict=True):
        given = [value for name in (newer, older) if (value := os.environ.pop(name, None)) is not None]
        os.environ[newer if torch.__version__ >= (2, 9) else older] = given[0] if given else default


def write(run: RunDirectory, rank: int) -> None:
    """Write the flight record of this rank, if torch keeps one.

    Raises:
        OSError: the file cannot be written.
    """
    record = _record()
    if record is not None:
        # torchfrtrace expects the rank after the prefix.
        path = run.stacks / f"{RunDirectory.FLIGHT_RECORD}{rank}"
        with open(path, "wb", opener=open_nofollow) as kept:  # Path.open has no opener
            kept.write(record)


def _record() -> bytes | None:
    """The last collectives of this rank and their state, in torchfrtrace's format; None if there are none."""
    for name in FLIGHT_RECORDERS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None and pickle.loads(record := dump()).get("entries"):
            return record
    return None
