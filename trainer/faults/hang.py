"""Evidence of a hang: a report from each rank with its stacks. Needs no torch, whose import may be what hangs."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

from trainer.contract.files.run_directory import RunDirectory, open_nofollow
from trainer.contract.hang_report import HangReport, report_file
from trainer.distributed.rendezvous import Ranks


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
    """Write the report with the stacks of all threads.

    Raises:
        OSError: the file cannot be written.
    """
    run.stacks.mkdir(parents=True, exist_ok=True)
    path = report_file(run.stacks, report.rank)
    with open(path, "w", encoding="utf-8", opener=open_nofollow) as file:  # Path.open has no opener
        print(json.dumps(dataclasses.asdict(report)), file=file)
        print("\nMain thread (most recent call last):", file=file)
        traceback.print_stack(_main_frame(), file=file)
        print("\nAll threads:", file=file, flush=True)
        faulthandler.dump_traceback(file)
