"""What is left of a hang: a report of each rank, NCCL's flight record, and one line that says where to look."""

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
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from trainer.contract.run_directory import RunDirectory, open_nofollow
from trainer.distributed.peers import ranges
from trainer.distributed.rendezvous import Ranks

FLIGHT_RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
"""torch's functions: of NCCL's collectives, and of any backend's (since 2.9)."""

RENAMED = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
}
"""What every torch reads -> what 2.9 and later want to read, which warn of the older names on each rank."""


def keep_flight_records(run: RunDirectory) -> None:
    """Lets torch remember the last collectives of this rank; called before it makes process groups.

    NCCL's own watchdog, the second line, then writes them to where `write` does. What is in the environment holds.
    """
    defaults = ("2000", f"{run.stacks}/{RunDirectory.FLIGHT_RECORD}")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    for (older, newer), default in zip(RENAMED.items(), defaults, strict=True):
        given = [value for name in (newer, older) if (value := os.environ.pop(name, None)) is not None]
        os.environ[newer if torch.__version__ >= (2, 9) else older] = given[0] if given else default


@dataclass(frozen=True)
class Report:
    """Where one rank stood when nothing moved: the first line of its file."""

    rank: int
    host: str
    pid: int
    iteration: int
    """Steps done."""
    phase: str
    at: str
    """The innermost line of ours or Megatron-Core's, as `step.py:140 _agree`."""
    quiet_s: float
    """How long it had stood there."""
    since: str
    """From when on, in local time."""

    @classmethod
    def of_this_rank(cls, ranks: Ranks, iteration: int, phase: str, since: float, quiet_s: float) -> Report:
        """What this process can say of itself."""
        return cls(
            rank=ranks.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            iteration=iteration,
            phase=phase,
            at=_place(),
            quiet_s=round(quiet_s, 1),
            since=time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(since)),
        )


def _place() -> str:
    """Where the main thread is in our code or Megatron-Core's: what these call is the same for most ranks."""
    frame = innermost = _main_frame()
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(("trainer.", "megatron.")):
        frame = frame.f_back
    frame = frame or innermost
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}" if frame else "?"


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def write(run: RunDirectory, report: Report) -> None:
    """Writes the report with the stacks of all threads, and the flight record where torch keeps one.

    Raises:
        OSError: a file cannot be written.
    """
    run.stacks.mkdir(parents=True, exist_ok=True)
    path = run.stacks / f"rank-{report.rank:05d}.txt"
    with open(path, "w", encoding="utf-8", opener=open_nofollow) as file:  # Path.open has no opener
        print(json.dumps(dataclasses.asdict(report)), file=file)
        print("\nMain thread (most recent call last):", file=file)
        traceback.print_stack(_main_frame(), file=file)
        print("\nAll threads:", file=file, flush=True)
        faulthandler.dump_traceback(file)
    record = _flight_record()
    if record is not None:
        # torchfrtrace finds the rank behind the prefix
        path = run.stacks / f"{RunDirectory.FLIGHT_RECORD}{report.rank}"
        with open(path, "wb", opener=open_nofollow) as kept:
            kept.write(record)


def _flight_record() -> bytes | None:
    """The last collectives of this rank and their state, as torchfrtrace reads them; None when none are kept."""
    for name in FLIGHT_RECORDERS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None and pickle.loads(record := dump()).get("entries"):
            return record
    return None


def read(run: RunDirectory) -> dict[int, Report]:
    """The reports by rank.

    Raises:
        OSError: the directory cannot be read.
    """
    reports = {}
    for path in run.stacks.glob("rank-*.txt"):
        with path.open(encoding="utf-8") as file:
            try:
                report = Report(**json.loads(file.readline()))
            except (ValueError, TypeError):  # being written
                continue
        reports[report.rank] = report
    return reports


def verdict(reports: Mapping[int, Report], world_size: int, hosts: Mapping[int, str], stacks: Path) -> str:
    """Which ranks did not report, or stand elsewhere than most; `hosts` is what is known of where they run."""
    quiet_s = max(report.quiet_s for report in reports.values())
    places = defaultdict(list)
    for rank in sorted(reports):
        places[reports[rank].iteration, reports[rank].at].append(rank)
    usual = max(places, key=lambda place: len(places[place]))
    suspects = []
    if missing := [rank for rank in range(world_size) if rank not in reports]:
        suspects.append(f"{_named(missing, hosts)}, which did not report")
    for place in sorted(places):  # those that are behind come first
        if place != usual:
            named = _named(places[place], {rank: reports[rank].host for rank in places[place]})
            suspects.append(f"{named}, which stands after iteration {place[0]} at {place[1]}")
    first = f"look first at {', then at '.join(suspects)}; " if suspects else ""
    others = f"rank {ranges(places[usual])}" if suspects else "every rank"
    return (
        f"hung: nothing moved for {quiet_s:g} s; {first}{others} waits after iteration {usual[0]} at {usual[1]}; "
        f"stacks and flight records are in {stacks}"
    )


def _named(ranks: list[int], hosts: Mapping[int, str]) -> str:
    names = dict.fromkeys(hosts[rank] for rank in ranks[:64] if rank in hosts)
    return f"rank {ranges(ranks)}" + (f" on {', '.join(names)}" if names else "")
