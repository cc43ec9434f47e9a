"""Evidence of a hang: a report from each rank with its stacks, and NCCL's flight record."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

import torch

from trainer.contract.files.run_directory import RunDirectory, open_nofollow
from trainer.contract.hang_report import HangReport, report_file
from trainer.distributed.rendezvous import Ranks

FLIGHT_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
"""torch's functions that dump the collectives of NCCL, and of any backend (since 2.9)."""

RENAMED = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
}
"""Variables that all versions of torch read -> their names since torch 2.9, which warns about the old ones."""


def keep_flight_records(run: RunDirectory) -> None:
    """Make torch record the last collectives of this rank. Call it before creating process groups.

    If this package's watch fails, NCCL's watchdog writes them to the same place as `write`. Variables that are set in
    the environment take precedence.
    """
    defaults = ("2000", f"{run.stacks}/{RunDirectory.FLIGHT_RECORD}")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    for (older, newer), default in zip(RENAMED.items(), defaults, strict=True):
        given = [value for name in (newer, older) if (value := os.environ.pop(name, None)) is not None]
        os.environ[newer if torch.__version__ >= (2, 9) else older] = given[0] if given else default


def report_of_this_rank(ranks: Ranks, iteration: int, phase: str, since: float, quiet_s: float) -> HangReport:
    """The report of this process. `since` is the time of the last progress (Unix time in seconds)."""
    return HangReport(
        rank=ranks.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        iteration=iteration,
        phase=phase,
        at=current_line(),
        quiet_s=round(quiet_s, 1),
        since=time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(since)),
    )


def current_line() -> str:
    """Innermost line of the main thread in the trainer or Megatron-Core. Deeper lines are the same on most ranks."""
    frame = innermost = _main_frame()
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(("trainer.", "megatron.")):
        frame = frame.f_back
    frame = frame or innermost
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}" if frame else "?"


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def write(run: RunDirectory, report: HangReport) -> None:
    """Write the report with the stacks of all threads, and the flight record if torch keeps one.

    Raises:
        OSError: a file cannot be written.
    """
    run.stacks.mkdir(parents=True, exist_ok=True)
    path = report_file(run.stacks, report.rank)
    with open(path, "w", encoding="utf-8", opener=open_nofollow) as file:  # Path.open has no opener
        print(json.dumps(dataclasses.asdict(report)), file=file)
        print("\nMain thread (most recent call last):", file=file)
        traceback.print_stack(_main_frame(), file=file)
        print("\nAll threads:", file=file, flush=True)
        faulthandler.dump_traceback(file)
    record = _flight_record()
    if record is not None:
        # torchfrtrace expects the rank after the prefix.
        path = run.stacks / f"{RunDirectory.FLIGHT_RECORD}{report.rank}"
        with open(path, "wb", opener=open_nofollow) as kept:
            kept.write(record)


def _flight_record() -> bytes | None:
    """The last collectives of this rank and their state, in torchfrtrace's format; None if there are none."""
    for name in FLIGHT_RECORDERS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None and pickle.loads(record := dump()).get("entries"):
            return record
    return None
