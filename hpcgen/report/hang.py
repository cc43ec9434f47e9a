"""What the ranks of a run that hung left in RUN_DIR/stacks, in one line."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hpcgen.report.history import number_or_none
from hpcgen.report.words import figure
from hpcgen.text import ranges

MOST_PLACES = 3
"""That the line names; the files have the rest."""
MOST_RANKS = 1_000_000
"""A larger one is no rank."""


def hung_at(stacks: Path) -> float | None:
    """When the last rank wrote its stacks (Unix seconds); None when none did."""
    try:
        return max((path.stat().st_mtime for path in _files(stacks)), default=None)
    except FileNotFoundError:  # a new attempt has set them aside meanwhile
        return None


def hang_in_words(stacks: Path, world_size: object) -> str:
    """For how long nothing moved, which of `world_size` ranks did not report, and where the others stand.

    Ranks that stand elsewhere than most come first. Says nothing of files that are still being written.
    """
    reports = {report["rank"]: report for report in map(_report, _files(stacks)) if report}
    if not reports:
        return ""
    quiet_s = max(number_or_none(report.get("quiet_s")) or 0.0 for report in reports.values())
    parts = [f"nothing moved for {figure(quiet_s, 3)} s"]
    if isinstance(world_size, int) and (missing := sorted(set(range(world_size)) - reports.keys())):
        parts.append(f"look first at rank {ranges(missing)}, which did not report")
    places: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, report in reports.items():
        places[str(report.get("iteration")), str(report.get("at"))].append(rank)
    fewest_first = sorted(places.items(), key=lambda place: len(place[1]))
    left_out = len(fewest_first) - MOST_PLACES
    for (iteration, at), ranks in fewest_first[:MOST_PLACES]:
        hosts = {str(reports[rank].get("host")) for rank in ranks}
        host = f" on {hosts.pop()}" if len(hosts) == 1 else ""
        parts.append(f"rank {ranges(sorted(ranks))}{host} stood after iteration {iteration} at {at}")
    return "; ".join([*parts, *([f"others at {left_out} more places"] if left_out > 0 else [])])


def _files(stacks: Path) -> list[Path]:
    return sorted(stacks.glob("rank-*.txt"))


def _report(path: Path) -> dict[str, Any] | None:
    """The first line of a rank's file; None when it is not all there."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            report = json.loads(file.readline())
    except (OSError, ValueError):
        return None
    if (
        not isinstance(report, dict)
        or type(report.get("rank")) is not int
        or not 0 <= report["rank"] < MOST_RANKS
    ):
        return None
    return report
