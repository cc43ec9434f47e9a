"""The page of a run's layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcgen.planning.request import make_allocation
from hpcgen.report import words
from hpcgen.report.html import Table, Tile, rendered
from hpcgen.report.layouts.memory import PARTS as MEMORY_PARTS
from hpcgen.report.layouts.scaling import scaling_charts
from hpcgen.report.layouts.views import COLORS, HEADS, views
from hpcgen.run_plan.layouts import summary
from hpcgen.run_plan.layouts.result import NodesLayouts, RunLayouts
from hpcgen.run_plan.prediction import Prediction
from hpcgen.run_plan.prediction_summary import PARTS as STEP_PARTS
from hpcgen.stages.train import TRAIN
from hpcgen.text import between, counted, duration, rough, time_between


def render_layouts(found: RunLayouts, curve: Sequence[NodesLayouts], now: float) -> str:
    """Renders the page.

    `curve` has the fastest layouts on other numbers of nodes as well, in ascending order.
    """
    run = found.run
    own_nodes = make_allocation(TRAIN, run.config, run.cluster, run.node_type).nodes
    shown = _shown(found, own_nodes)
    all_views = views(shown)
    used = {color for view in all_views for _, color, _ in view.parts}
    return rendered(
        "layouts/page.html.j2",
        charts=scaling_charts(curve, own_nodes),
        name=found.run.config.name,
        created=words.moment(now),
        place=f"{counted(shown.num_nodes, 'node')} of type {found.run.cluster.node_type}, "
        f"{counted(shown.num_gpus, 'GPU')} ({shown.machine.gpu_model})",
        tiles=list(_tiles(shown)),
        sentences=list(_sentences(found, shown)),
        views=all_views,
        heads=HEADS,
        step_parts=[(STEP_PARTS[part], color) for part, color in COLORS.items() if color in used],
        memory_parts=list(enumerate(MEMORY_PARTS)),
        table=_table(curve),
        guesses=shown.prediction.guesses if shown.prediction else shown.search.best[0].step.guesses,
        is_measured=shown.machine.measurements is not None,
    )


def _shown(found: RunLayouts, own_nodes: int) -> NodesLayouts:
    """The number of nodes whose layouts the page shows: the one that was chosen, that of the run, or the largest."""
    fitting = [each for each in found.on if each.first]
    own = next((each for each in fitting if each.num_nodes == own_nodes), fitting[-1])
    return found.chosen or own


def _tiles(shown: NodesLayouts) -> Iterator[Tile]:
    first, prediction = shown.search.best[0], shown.prediction
    yield Tile(title="Best layout", value=first.name, notes=(summary.of_own(shown),))
    yield Tile(
        title="Throughput",
        value=rough(first.tokens_per_s / shown.num_gpus, 3),
        unit="tokens/s per GPU",
        notes=(f"{words.count_in_short(first.tokens_per_s)} tokens/s of all GPUs",),
    )
    if prediction is None:
        yield Tile(title="Step", value=duration(first.step.total), notes=(shown.no_prediction,))
        return
    low, high = prediction.range
    yield Tile(
        title="Step",
        value=duration(first.step.total),
        notes=(f"{duration(low * first.step.total)} to {duration(high * first.step.total)}",),
    )
    yield Tile(
        title="Time in jobs",
        value=time_between(prediction.low.total_s, prediction.high.total_s),
        notes=(f"{words.count_in_short(prediction.remaining_tokens)} tokens, without the queue",),
    )
    yield _cost(prediction)


def _cost(found: Prediction) -> Tile:
    hours = f"{_between(found.low.gpu_hours, found.high.gpu_hours)} GPU-hours"
    if found.price_per_gpu_hour is None:
        return Tile(title="Cost", value=hours, notes=("the profile sets no price",))
    low, high = found.cost(found.low), found.cost(found.high)
    assert low is not None
    assert high is not None
    return Tile(title="Cost", value=_between(low, high), unit=found.currency, notes=(hours,))


def _between(low: float, high: float) -> str:
    """A range of rough figures, from a million with a prefix."""
    return between(low, high) if high < 1e6 else f"{words.short(low, 2)} to {words.short(high, 2)}"


def _sentences(found: RunLayouts, shown: NodesLayouts) -> Iterator[str]:
    """Sentences that a reader should know first."""
    if found.goal is not None:
        heading, text = summary.of_goal(found)
        yield f"{heading.capitalize()}: {text}."
    if (reason := summary.reason(shown)) is not None:
        yield f"{reason}."
    if (first := shown.search.best[0]).is_risky:
        yield f"{summary.risk(shown, first)}."


def _table(curve: Sequence[NodesLayouts]) -> Table:
    return Table(
        title="By number of nodes",
        heads=("nodes", "GPUs", "best layout", "tokens/s per GPU", "time in jobs", "GPU-hours"),
        rows=tuple(map(_row, curve)),
    )


def _row(found: NodesLayouts) -> tuple[str, ...]:
    nodes, prediction = (f"{found.num_nodes:,}", f"{found.num_gpus:,}"), found.prediction
    if found.first is None:
        return *nodes, "none fits or is valid", "", "", ""
    rate = rough(found.first.tokens_per_s / found.num_gpus, 3)
    if prediction is None:
        return *nodes, found.first.name, rate, found.no_prediction, ""
    low, high = prediction.low, prediction.high
    time, hours = time_between(low.total_s, high.total_s), between(low.gpu_hours, high.gpu_hours)
    return *nodes, found.first.name, rate, time, hours
