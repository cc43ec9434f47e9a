"""Reports of the ranks of a hung run, and the sentence that says where to look first.

Each rank writes its report as the first line of a file in RUN_DIR/stacks (`trainer.faults.hang`). The trainer's log and
`hpcgen report` describe the hang in the same words.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.contract.files.regular_file import opener
from trainer.contract.wording import counted, rank_list

MAX_PLACES = 3
"""Maximum number of places in the sentence; the files have the rest."""
MAX_RANKS = 1_000_000
"""Larger rank numbers are invalid."""
MAX_HOSTS = 64
"""Maximum number of ranks whose hosts are named together."""


@dataclass(frozen=True)
class HangReport:
    """Position of one rank when the run hung: the first line of the rank's file."""

    rank: int
    host: str
    pid: int
    iteration: int
    """Number of completed steps."""
    phase: str
    at: str
    """Innermost line of the trainer or Megatron-Core on the stack, such as `step.py:140 _agree`."""
    quiet_s: float
    """Time without progress (seconds)."""
    since: str
    """Local time of the last progress."""


TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("rank", "pid", "iteration"), (int,)),
    **dict.fromkeys(("host", "phase", "at", "since"), (str,)),
    "quiet_s": (int, float),
}
"""Types of the fields in JSON."""


def report_file(stacks: Path, rank: int) -> Path:
    """Path of a rank's file."""
    return stacks / f"rank-{rank:05d}.txt"


def report_files(stacks: Path) -> list[Path]:
    """The files of all ranks that have one.

    Raises:
        OSError: the directory cannot be read.
    """
    return sorted(stacks.glob("rank-*.txt"))


def read_reports(stacks: Path) -> dict[int, HangReport]:
    """The reports by rank. Leaves out files that are invalid, unreadable or still being written.

    Raises:
        OSError: the directory cannot be read.
    """
    found = (_read(path) for path in report_files(stacks))
    return {report.rank: report for report in found if report is not None}


def _read(path: Path) -> HangReport | None:
    try:
        with open(path, encoding="utf-8", errors="replace", opener=opener) as file:
            values: dict[str, Any] = json.loads(file.readline())
        if values.keys() != TYPES.keys() or any(type(values[name]) not in TYPES[name] for name in TYPES):
            return None
    except (OSError, ValueError, AttributeError):
        return None
    return HangReport(**values) if 0 <= values["rank"] < MAX_RANKS else None


def describe_hang(reports: Mapping[int, HangReport], world_size: int | None, hosts: Mapping[int, str]) -> str:
    """Say how long the run made no progress, which ranks did not report, and which ranks wait in an unusual place.

    `world_size` is None if unknown. `hosts` are the known hosts of ranks that did not report. Places with the fewest
    completed steps come first, then places with the fewest ranks.
    """
    quiet_s = max(report.quiet_s for report in reports.values())
    places: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank in sorted(reports):
        places[reports[rank].iteration, reports[rank].at].append(rank)
    usual = max(places, key=lambda place: len(places[place]))
    others = sorted(places.keys() - {usual}, key=lambda place: (place[0], len(places[place]), place[1]))
    suspects = []
    if missing := [rank for rank in range(min(world_size or 0, MAX_RANKS)) if rank not in reports]:
        suspects.append(f"{_named(missing, hosts)}, which did not report")
    for place in others[:MAX_PLACES]:
        named = _named(places[place], {rank: reports[rank].host for rank in places[place]})
        suspects.append(f"{named}, waiting after iteration {place[0]} at {place[1]}")
    if len(others) > MAX_PLACES:
        suspects.append(f"others at {counted(len(others) - MAX_PLACES, 'more place')}")
    first = f"Look first at {', then at '.join(suspects)}. " if suspects else ""
    waiting = rank_list(places[usual]).capitalize() if suspects else "Every rank"
    verb = "wait" if suspects and len(places[usual]) > 1 else "waits"
    return f"no progress for {quiet_s:g} s. {first}{waiting} {verb} after iteration {usual[0]} at {usual[1]}"


def _named(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Ranks with the names of their hosts."""
    names = dict.fromkeys(hosts[rank] for rank in ranks[:MAX_HOSTS] if rank in hosts)
    return rank_list(ranks) + (f" on {', '.join(names)}" if names else "")
