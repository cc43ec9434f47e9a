"""Bars of where the time of runs went: one for each attempt of a single run, or one for each of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcgen.ledger.ledger import Ledger
from hpcgen.ledger.parts import PARTS, Part
from hpcgen.ledger.timeline import Spent
from hpcgen.report import words

MAX_BARS = 12
"""Maximum number of bars. Of more attempts, only the newest ones are shown."""
STYLES = {
    Part.PRODUCTIVE: "c2",
    Part.REDONE: "c1",
    Part.DATA_WAIT: "c4",
    Part.EVALUATION: "c0",
    Part.SAVE: "c3",
    Part.RESTORE: "c7",
    Part.START_UP: "c6",
    Part.INFRASTRUCTURE: "c6 pale",
    Part.ENDING: "c1 pale",
    Part.QUEUE: "c5",
    Part.IDLE: "c5 pale",
    Part.UNACCOUNTED: "c5 striped",
}
"""Classes in page.css: one of the page's colors, and how it is drawn."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a bar."""

    style: str
    percent: float
    """Length in percent of the bar."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A time, divided into parts."""

    label: str
    percent: float
    """Length in percent of the longest bar."""
    segments: tuple[Segment, ...]
    note: str


@dataclass(frozen=True, kw_only=True)
class TimeBars:
    """The panel."""

    bars: tuple[Bar, ...]
    legend: tuple[Segment, ...]
    """Parts of all bars together."""
    summary: str
    note: str


def time_bars(names: Sequence[str], ledgers: Sequence[Ledger | None]) -> TimeBars | None:
    """The panel of these runs; None if nothing is known of their time."""
    known = [(name, ledger) for name, ledger in zip(names, ledgers, strict=True) if ledger is not None]
    total = Spent.total([ledger.spent for _, ledger in known])
    if total.wall_s <= 0:
        return None
    if len(names) > 1:
        rows = [(name, ledger.spent) for name, ledger in known]
    else:
        attempts = known[0][1].attempts
        rows = [(f"attempt {number}", attempt.spent) for number, attempt in enumerate(attempts, 1)]
    shown = rows[-MAX_BARS:]
    if len(shown) > 1 and len(names) == 1:
        shown = [("all", total), *shown]
    longest_s = max(spent.wall_s for _, spent in shown)
    left_out = len(rows) - MAX_BARS
    return TimeBars(
        bars=tuple(_bar(label, spent, longest_s) for label, spent in shown),
        legend=tuple(_segments(total)),
        summary=f"{words.duration(total.wall_s)}; " + "; ".join(each.text for each in _segments(total)),
        note=f"The newest {MAX_BARS} of {len(rows)}." if left_out > 0 else "",
    )


def _bar(label: str, spent: Spent, longest_s: float) -> Bar:
    goodput = f", goodput {words.percent(spent.goodput)}" if spent.goodput is not None else ""
    return Bar(
        label=label,
        percent=100 * spent.wall_s / longest_s if longest_s > 0 else 0.0,
        segments=tuple(_segments(spent)),
        note=f"{words.duration(spent.wall_s)}{goodput}",
    )


def _segments(spent: Spent) -> list[Segment]:
    return [
        Segment(
            style=STYLES[part],
            percent=100 * seconds / spent.wall_s,
            text=f"{part.label} {words.duration(seconds)} ({words.percent(seconds / spent.wall_s)})",
        )
        for part in PARTS
        if spent.wall_s > 0 and (seconds := spent.parts[part.value]) > 0.0005 * spent.wall_s
    ]
