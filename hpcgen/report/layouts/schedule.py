"""When the stages of a pipeline compute in a step: forward and backward passes, bubbles, and what follows them.

Passes are lines in an SVG that the page stretches. The middle of a long step repeats and is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from hpcgen.planning.layouts.result import RankedLayout
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time import Machine, Schedule, schedule
from hpcgen.planning.step_time.pipeline import Interval
from hpcgen.report.chart import Tick
from hpcgen.report.scale import Scale, tick_texts
from hpcgen.text import counted, duration

WIDTH = 10_000
ROW = 10
"""Size of the SVG: its width, and the height of a stage."""
GAP = 4.0
"""Pause between two passes, so that they can be told apart."""
CUT_SHARE = 0.05
"""Width of the mark in place of the middle."""
WORTH_A_CUT = 0.15
"""The middle is left out if it takes at least this part of the step."""
AROUND = 1.2
"""Time to show on each side of it, relative to the time until the first stage has ended its first backward pass, and to
that from the start of its last forward pass."""
MIN_SHOWN = 5
"""Microbatches to show at least on each side."""
NUMBERED_SHARE = 1.6
"""Width of a pass in percent that has room for the number of its microbatch."""
FAINT = 0.75
"""Opacity of passes below which their numbers are dark on a light page."""


@dataclass(frozen=True)
class Strip:
    """The passes of one kind."""

    kind: str
    opacity: float
    d: str


@dataclass(frozen=True)
class Mark:
    """A text over the passes, or a part of the step that is not a pass."""

    left: float
    """In percent of the picture, like `width`."""
    width: float
    text: str
    kind: str = ""
    stage: int = 0


@dataclass(frozen=True, kw_only=True)
class SchedulePicture:
    """The step of a layout."""

    stages: int
    chunks: int
    strips: tuple[Strip, ...]
    numbers: tuple[Mark, ...]
    """Microbatches."""
    blocks: tuple[Mark, ...]
    """Waiting for weights, reduction of gradients and update, over all stages."""
    cut: Mark | None
    ticks: tuple[Tick, ...]
    widest: int
    """Number of passes of a stage that are shown, from which the smallest width of the picture follows."""
    summary: str


def schedule_picture(layout: RankedLayout, machine: Machine) -> SchedulePicture:
    """The picture of a layout's step."""
    found = schedule(Setup.of_facts(layout.facts, layout.layout), machine)
    time = _Time.of(found, layout)
    shown = [each for each in found.passes.intervals if time.shows(each)]
    stages = layout.layout.pipeline_model_parallel_size
    chunks = layout.layout.virtual_pipeline_model_parallel_size
    return SchedulePicture(
        stages=stages,
        chunks=chunks,
        strips=tuple(_strips(shown, time, chunks)),
        numbers=tuple(_numbers(shown, time, chunks)),
        blocks=tuple(_blocks(found, time)),
        cut=_cut(time, found, layout),
        ticks=tuple(_ticks(time)),
        widest=len(shown) // stages,
        summary=_summary(layout),
    )


def _summary(layout: RankedLayout) -> str:
    axes, step = layout.layout, layout.step
    stages = counted(axes.pipeline_model_parallel_size, "stage")
    microbatches = counted(axes.num_microbatches, "microbatch", "microbatches")
    bubble = f"the slowest stage waits for others in {step.pipeline_bubble / step.total:.1%} of the step"
    return f"{microbatches} on {stages} in {duration(step.total)}; {bubble}"


@dataclass(frozen=True)
class _Time:
    """The axis: seconds of the step, without those of the middle."""

    begin: float
    """Start of the first pass."""
    total: float
    cut: tuple[float, float] | None
    """The middle, in seconds of the step."""

    @classmethod
    def of(cls, found: Schedule, layout: RankedLayout) -> _Time:
        """The axis with the first and last microbatches."""
        passes, gather = found.passes, found.gather
        of_first = [each for each in passes.intervals if each.stage == 0]
        first_backward = next(each for each in of_first if not each.is_forward)
        last_forward = max((each for each in of_first if each.is_forward), key=lambda each: each.start)
        shortest = MIN_SHOWN * passes.computing[0] / layout.layout.num_microbatches
        left = max(shortest, AROUND * first_backward.end)
        right = passes.total - max(shortest, AROUND * (passes.total - last_forward.start))
        if passes.cut is not None:
            left, right = min(left, passes.cut[0]), max(right, passes.cut[1])
        is_cut = passes.cut is not None or right - left > WORTH_A_CUT * passes.total
        return cls(gather, found.total, (gather + left, gather + right) if is_cut else None)

    @property
    def shown_s(self) -> float:
        """Seconds that are shown."""
        return self.total - (self.cut[1] - self.cut[0] if self.cut else 0.0)

    @property
    def length(self) -> float:
        """Length of the axis in seconds, with the mark of the cut."""
        return self.shown_s / (1 - CUT_SHARE) if self.cut else self.shown_s

    def shows(self, each: Interval) -> bool:
        """True for a pass that starts before the middle or after it."""
        start = self.begin + each.start
        return self.cut is None or start < self.cut[0] - 1e-9 or start >= self.cut[1] - 1e-9

    def place(self, seconds: float) -> float:
        """Position of a time of the step, from 0 to 1."""
        if self.cut and seconds > self.cut[0]:
            after = max(0.0, seconds - self.cut[1])
            return (self.cut[0] + CUT_SHARE * self.length + after) / self.length
        return seconds / self.length


def _strips(shown: list[Interval], time: _Time, chunks: int) -> Iterator[Strip]:
    """Passes by direction and chunk. Later chunks have stronger colors."""
    lines: dict[tuple[bool, int], list[str]] = defaultdict(list)
    for each in shown:
        left = WIDTH * time.place(time.begin + each.start)
        width = WIDTH * (each.end - each.start) / time.length
        line = f"M{left:.0f} {each.stage * ROW + ROW // 2}h{max(1.0, width - min(GAP, width / 4)):.0f}"
        lines[each.is_forward, each.chunk].append(line)
    for (is_forward, chunk), passes in sorted(lines.items(), reverse=True):
        kind = "forward" if is_forward else "backward"
        yield Strip(kind, _opacity(chunk, chunks), "".join(passes))


def _opacity(chunk: int, chunks: int) -> float:
    return 1.0 if chunks == 1 else round(0.4 + 0.6 * chunk / (chunks - 1), 2)


def _numbers(shown: list[Interval], time: _Time, chunks: int) -> Iterator[Mark]:
    """The number of the microbatch of each pass that has room for it, from 1."""
    for each in shown:
        width = 100 * (each.end - each.start) / time.length
        if width >= NUMBERED_SHARE:
            left = 100 * time.place(time.begin + each.start)
            kind = "faint" if _opacity(each.chunk, chunks) < FAINT else ""
            yield Mark(left, width, str(each.microbatch + 1), kind, each.stage)


def _blocks(found: Schedule, time: _Time) -> Iterator[Mark]:
    """The parts of the step before and after its passes."""
    at = 0.0
    for kind, text, seconds in (
        ("gather", "waiting for weights", found.gather),
        ("", "", found.passes.total),
        ("reduction", "reduction of gradients", found.reduction),
        ("optimizer", "optimizer", max(found.optimizer)),
    ):
        if kind and seconds > 0:
            left = time.place(at)
            width = time.place(at + seconds) - left
            yield Mark(100 * left, 100 * width, f"{text}, {duration(seconds)}", kind)
        at += seconds


def _cut(time: _Time, found: Schedule, layout: RankedLayout) -> Mark | None:
    if time.cut is None:
        return None
    seconds = time.cut[1] - time.cut[0]
    number = round(seconds / (found.passes.computing[found.passes.slowest] / layout.layout.num_microbatches))
    text = f"{duration(seconds)} more like this, about {counted(number, 'microbatch', 'microbatches')}"
    return Mark(100 * time.place(time.cut[0]), 100 * CUT_SHARE, text)


def _ticks(time: _Time) -> Iterator[Tick]:
    """Round times on both sides of the cut."""
    begin, end = time.cut or (time.total, time.total)
    sides = [(0.0, begin), (end, time.total)] if time.cut else [(0.0, time.total)]
    values = [
        tick
        for low, high in sides
        for tick in Scale(low=low, high=high).ticks(10 // len(sides))
        if low <= tick <= high
    ]
    for value, text in zip(values, tick_texts(values), strict=True):
        yield Tick(at=100 * time.place(value), text=f"{text} s")
