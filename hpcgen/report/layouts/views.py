"""The layouts of a search: their figures in a table, and the parts of their steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcgen.planning.layouts.reasons import compared
from hpcgen.planning.layouts.result import RankedLayout
from hpcgen.report.html import Table
from hpcgen.report.layouts.devices import DevicesPicture, devices_picture
from hpcgen.report.layouts.memory import MemoryPicture, memory_picture
from hpcgen.report.layouts.schedule import SchedulePicture, schedule_picture
from hpcgen.run_plan.layouts.result import NodesLayouts
from hpcgen.run_plan.prediction_summary import PARTS
from hpcgen.text import duration, rough

COLORS = {
    "compute": 0,
    "host": 5,
    "tensor_parallel": 1,
    "context_parallel": 4,
    "expert_parallel": 6,
    "data_parallel": 2,
    "pipeline_bubble": 8,
    "pipeline_transfers": 7,
    "optimizer": 3,
}
"""Part of a step -> its color on the page. The bubble is hatched."""

NOTHING = "0 s"
"""A part of the step that two compared layouts do not have."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A layout with its pictures."""

    label: str
    """Its place in the table: "1", or "own" for a layout of the run that is not among the best."""
    name: str
    tags: tuple[str, ...]
    figures: tuple[str, ...]
    """Cells of the table, in the order of HEADS."""
    is_risky: bool
    parts: tuple[tuple[str, int, float], ...]
    """Parts of the step: text, color, and width in percent of the longest step."""
    memory: MemoryPicture
    schedule: SchedulePicture
    devices: DevicesPicture
    comparison: Table | None
    """With the first layout, or of the first layout with that of the run or the next one."""


HEADS = ("tokens/s per GPU", "speed", "step", "bubble", "free memory")


def views(found: NodesLayouts) -> list[View]:
    """The best layouts, and that of the run."""
    layouts = list(found.search.best)
    own = found.search.own
    names = [each.name for each in layouts]
    labels = [str(number) for number in range(1, len(layouts) + 1)]
    if own is not None and own.name not in names:
        layouts.append(own)
        labels.append("own")
    longest = max(each.step.total for each in layouts)
    first = layouts[0]
    return [
        View(
            label=label,
            name=each.name,
            tags=tuple(_tags(each, own, first)),
            figures=_figures(each, first, found.num_gpus),
            is_risky=each.is_risky,
            parts=tuple(_parts(each, longest)),
            comparison=_comparison(each, own if each is first and own is not None else first, layouts),
            memory=memory_picture(each),
            schedule=schedule_picture(each, found.machine),
            devices=devices_picture(each, found.machine, has_nvlink=found.run.node_type.nvlink is not None),
        )
        for label, each in zip(labels, layouts, strict=True)
    ]


def _comparison(layout: RankedLayout, other: RankedLayout, layouts: Sequence[RankedLayout]) -> Table | None:
    """The two side by side, with another one in place of the layout itself."""
    others = [each for each in (other, *layouts) if each.name != layout.name]
    if not others:
        return None
    rows = compared(layout, others[0])
    return Table(
        title="Compared",
        heads=("", layout.name, others[0].name),
        rows=tuple(row for row in rows if row[1:] != (NOTHING, NOTHING)),
    )


def _tags(layout: RankedLayout, own: RankedLayout | None, first: RankedLayout) -> Iterator[str]:
    if layout is first:
        yield "best"
    if own is not None and layout.name == own.name:
        yield "run file"
    if layout.is_risky:
        yield "little free memory"


def _figures(layout: RankedLayout, first: RankedLayout, num_gpus: int) -> tuple[str, ...]:
    return (
        rough(layout.tokens_per_s / num_gpus, 3),
        f"{layout.tokens_per_s / first.tokens_per_s:.1%}",
        duration(layout.step.total),
        f"{layout.step.pipeline_bubble / layout.step.total:.1%}",
        f"{layout.free_gib:.1f} GiB ({layout.free_share:.0%})",
    )


def _parts(layout: RankedLayout, longest: float) -> Iterator[tuple[str, int, float]]:
    for name, words in PARTS.items():
        seconds = getattr(layout.step, name)
        if seconds > 0:
            text = f"{words}: {duration(seconds)}, {seconds / layout.step.total:.1%}"
            yield text, COLORS[name], 100 * seconds / longest
