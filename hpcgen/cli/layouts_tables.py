"""The tables and lines of `hpcgen layouts`."""

from __future__ import annotations

import textwrap

import click
from rich.table import Table

from hpcgen.cli.options import warn
from hpcgen.cli.terminal import new_table, print_table
from hpcgen.planning.layouts.reasons import compared
from hpcgen.planning.layouts.result import RankedLayout
from hpcgen.run_plan.layouts import summary
from hpcgen.run_plan.layouts.batch import batch_limit
from hpcgen.run_plan.layouts.result import Goal, Kind, NodesLayouts, RunLayouts
from hpcgen.run_plan.plan import located_in
from hpcgen.run_plan.prediction import Prediction
from hpcgen.run_plan.prediction_summary import figures, lines
from hpcgen.text import apart, counted, rough, scaled

WIDTH = 80
"""Width of text, and of tables in pipes."""
INDENT = 12
"""Width of the headings of lines."""
DAY = 86400
OWN = "own"
"""The name of the run's own layout in place of a row's number."""


def print_layouts(found: RunLayouts) -> None:
    """Prints a table of the numbers of nodes if there is a choice, and the layouts on the chosen one."""
    if found.goal is None and found.chosen is not None:
        _print_chosen(found.chosen)
        return
    _print_table(_nodes_table(found))
    told = [summary.of_goal(found)] if found.goal is not None else []
    if slower := summary.of_slower(found):
        told.append(("slower", "; ".join(slower)))
    if told:
        click.echo()
        _print_lines(told)
    if found.chosen is not None:
        click.echo()
        _print_chosen(found.chosen)


def _print_chosen(found: NodesLayouts) -> None:
    first = found.first
    assert first is not None
    click.echo(f"{counted(found.num_nodes, 'node')} with {counted(found.num_gpus, 'GPU')}:\n")
    _print_table(_layouts_table(found))
    click.echo()
    _print_lines(_comparisons(found))
    click.echo(f"\nRow 1, {first.name}:\n")
    _print_lines(_prediction(found))
    if first.is_risky:
        warn([summary.risk(found, first)])
    if found.prediction is not None:
        warn(str(located_in(found.run, problem)) for problem in found.prediction.warnings)


def print_comparison(first: RankedLayout, second: RankedLayout) -> None:
    """Prints two layouts side by side."""
    table = new_table()
    table.add_column("", overflow="fold")
    for layout in (first, second):
        table.add_column(layout.name, justify="right", overflow="fold")
    for heading, *cells in compared(first, second):
        table.add_row(heading, *cells)
    _print_table(table)


def _nodes_table(found: RunLayouts) -> Table:
    """A row for each number of nodes, with its first layout."""
    has_price = any(each.prediction and each.prediction.price_per_gpu_hour is not None for each in found.on)
    titles = ["days", "GPU-hours", *(["cost"] if has_price else [])]
    table = _table("nodes", "layout", "tokens/s", "per GPU", *titles, "free GiB")
    for each in found.on:
        first = each.first
        if first is None:
            table.add_row(str(each.num_nodes), f"no layout {'fits' if each.search.num_valid else 'is valid'}")
            continue
        speed = scaled(first.tokens_per_s), rough(first.tokens_per_s / each.num_gpus, 3)
        cells = [] if each.prediction is None else _of_run(each.prediction, found.goal)
        shown = [*cells, *(["?"] * (len(titles) - len(cells)))]
        table.add_row(str(each.num_nodes), first.name, *speed, *shown, _free(first))
    return table


def _of_run(prediction: Prediction, goal: Goal | None) -> list[str]:
    """The likely days, GPU-hours and, with a price, cost of a run. A figure above the goal is marked."""
    likely = prediction.likely
    values: dict[Kind, float | None] = {
        "time": likely.total_s / DAY,
        "gpu_hours": likely.gpu_hours,
        "cost": prediction.cost(likely),
    }
    return [_figure(kind, value, goal) for kind, value in values.items() if value is not None]


def _figure(kind: Kind, value: float, goal: Goal | None) -> str:
    if goal is None or goal.of != kind:
        return rough(value, 3)
    limit = goal.limit / DAY if kind == "time" else goal.limit
    return f"{apart(value, limit)}{'!' if value > limit else ''}"


def _layouts_table(found: NodesLayouts) -> Table:
    """A row for each layout, and one for the run's own."""
    table = _table("", "layout", "tokens/s/GPU", "MFU", "step", "free GiB", "vs 1")
    first, own = found.first, found.search.own
    assert first is not None
    rows = {str(number): layout for number, layout in enumerate(found.search.best, 1)}
    if own is not None and all(layout.changes for layout in rows.values()):
        rows[OWN] = own
    for name, layout in rows.items():
        shown = summary.row(found, layout)
        table.add_row(
            name if layout.changes or name == OWN else f"{name}*",
            layout.name,
            rough(shown["tokens_per_s_per_gpu"], 3),
            f"{shown['mfu']:.0%}",
            f"{rough(layout.step.total, 3)} s",
            _free(layout),
            _relative(layout, first),
        )
    return table


def _relative(layout: RankedLayout, first: RankedLayout) -> str:
    """The difference in speed to the first layout."""
    difference = round(layout.tokens_per_s / first.tokens_per_s - 1, 3)
    return "" if layout is first else f"{difference:+.1%}" if difference else "0.0%"


def _free(layout: RankedLayout) -> str:
    """The free memory of the fullest GPU in GiB, marked if it is a risk."""
    return f"{layout.free_gib:.1f}{'!' if layout.is_risky else ''}"


def _table(*titles: str) -> Table:
    table = new_table()
    for title in titles:
        is_layout = title == "layout"
        table.add_column(title, justify="left" if is_layout else "right", no_wrap=not is_layout)
    return table


def _print_table(table: Table) -> None:
    print_table(table, WIDTH, is_plain=True)


def _print_lines(lines: list[tuple[str, str]]) -> None:
    """Prints headings and text that is wrapped next to them."""
    for heading, text in lines:
        first, others = f"{heading:<{INDENT}}", " " * INDENT
        click.echo(textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=others))


def _comparisons(found: NodesLayouts) -> list[tuple[str, str]]:
    """How the first layout compares with the next one and with the run's own."""
    why = summary.reason(found)
    limit = batch_limit(found)
    return [
        *([("why", why)] if why is not None else []),
        ("this run", summary.of_own(found)),
        *([("batch", limit)] if limit else []),
    ]


def _prediction(found: NodesLayouts) -> list[tuple[str, str]]:
    """Times and resources of the run with the first layout, and what they are based on."""
    prediction = found.prediction
    if prediction is None:
        return [("prediction", f"none: {found.no_prediction}")]
    is_fp8 = prediction.trainer.training.fp8 is not None
    return [*lines(figures(prediction), is_fp8=is_fp8), ("guessed", summary.guesses(prediction))]
