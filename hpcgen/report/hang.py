"""One-line summary of the files that the ranks of a hung run wrote to RUN_DIR/stacks."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hpcgen.report.history import number_or_none
from hpcgen.report.words import figure
from hpcgen.text import counted
from trainer.contract.wording import rank_list

MAX_PLACES = 3
"""Maximum number of places in the summary; the files have the rest."""
MAX_RANKS = 1_000_000
"""Larger rank numbers are invalid."""


def hung_at(stacks: Path) -> float | None:
    """Time at which the last rank wrote its stacks (Unix time in seconds); None if no rank did."""
    try:
        return max((path.stat().st_mtime for path in _files(stacks)), default=None)
    except FileNotFoundError:  # a new attempt has just moved them
        return None


def describe_hang(stacks: Path, world_size: object) -> str:
    """Describes how long the run made no progress, which ranks did not report, and where the others wait.

    The words are those of the trainer's log (trainer.faults.hang). Places with the fewest ranks come first. Files that
    are still being written are ignored.
    """
    reports = {report["rank"]: report for report in map(_report, _files(stacks)) if report}
    if not reports:
        return ""
    quiet_s = max(number_or_none(report.get("quiet_s")) or 0.0 for report in reports.values())
    suspects = []
    if isinstance(world_size, int) and (missing := sorted(set(range(world_size)) - reports.keys())):
        suspects.append(f"{rank_list(missing)}, which did not report")
    places: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, report in reports.items():
        places[str(report.get("iteration")), str(report.get("at"))].append(rank)
    *fewest_first, usual = sorted(places.items(), key=lambda place: len(place[1]))
    for (iteration, at), ranks in fewest_first[:MAX_PLACES]:
        hosts = {str(reports[rank].get("host")) for rank in ranks}
        host = f" on {hosts.pop()}" if len(hosts) == 1 else ""
        suspects.append(f"{rank_list(sorted(ranks))}{host}, waiting after iteration {iteration} at {at}")
    if len(fewest_first) > MAX_PLACES:
        suspects.append(f"others at {counted(len(fewest_first) - MAX_PLACES, 'more place')}")
    first = f"Look first at {', then at '.join(suspects)}. " if suspects else ""
    (iteration, at), ranks = usual
    others = rank_list(sorted(ranks)).capitalize() if suspects else "Every rank"
    verb = "wait" if suspects and len(ranks) > 1 else "waits"
    return (
        f"no progress for {figure(quiet_s, 3)} s. {first}{others} {verb} after iteration {iteration} at {at}"
    )


def _files(stacks: Path) -> list[Path]:
    return sorted(stacks.glob("rank-*.txt"))


def _report(path: Path) -> dict[str, Any] | None:
    """Reads the first line of a rank's file; None if it is incomplete."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            report = json.loads(file.readline())
    except (OSError, ValueError):
        return None
    if (
        not isinstance(report, dict)
        or type(report.get("rank")) is not int
        or not 0 <= report["rank"] < MAX_RANKS
    ):
        return None
    return report
