"""Searches layouts for `hpcgen layouts`: prints, compares, draws and writes them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from hpcgen import api
from hpcgen.cli.layouts_tables import print_comparison, print_layouts
from hpcgen.cli.options import write_output
from hpcgen.cli.quantities import OWN
from hpcgen.cli.terminal import spinner
from hpcgen.config.shown import show
from hpcgen.errors import HpcgenError
from hpcgen.files import replace_text, require_target, require_writable, shared_as_directory
from hpcgen.planning.layouts.result import RankedLayout
from hpcgen.run_plan.layouts import summary
from hpcgen.run_plan.layouts.choice import choose, require_no_others
from hpcgen.run_plan.layouts.find import find_curve, own_mistake
from hpcgen.run_plan.layouts.result import RunLayouts
from hpcgen.run_plan.layouts.summary import written_reason
from hpcgen.text import counted


def show_layouts(
    config: Path,
    overrides: tuple[str, ...],
    nodes: tuple[int, ...],
    top: int,
    finish_in: float | None,
    budget: tuple[float, bool] | None,
    compare: tuple[str, str] | None,
    write: str | None,
    html: Path | None,
    *,
    as_json: bool,
) -> None:
    """Finds layouts, prints or compares them, and writes what is asked for. The options are those of the command.

    Raises:
        HpcgenError: the options conflict, the run file is invalid, no layout fits, or a file cannot be written.
    """
    if as_json and str(html) == "-":
        raise HpcgenError("--json and --html - both write to standard output", "give --html a file")
    if html is not None and str(html) != "-":
        require_target(html)
    if write is not None:
        require_no_others(config, overrides)
        require_writable(config)
    if len(nodes) > 1 and finish_in is None and budget is None and (write or compare):
        option = "--write" if write else "--compare"
        raise HpcgenError(
            f"{option} needs one number of nodes", "give one with --nodes, or a deadline or a budget"
        )
    run = api.load_run(config, overrides)
    with _progress() as on_search:
        found = api.layouts(
            run,
            nodes,
            top,
            finish_in_s=finish_in,
            budget=budget[0] if budget and not budget[1] else None,
            gpu_hours=budget[0] if budget and budget[1] else None,
            on_search=on_search,
        )
    compared = [_row(found, name, "--compare") for name in compare or ()]
    written = None if write is None else _row(found, write, "--write")
    if as_json:
        click.echo(json.dumps(summary.in_json(found), indent=1))
    elif compared:
        print_comparison(*compared)
    elif str(html) != "-":
        print_layouts(found)
    if html is not None:
        _write_page(html, found)
    if written is not None:
        _write(config, overrides, found, written)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """A callback that shows on a terminal for which number of nodes hpcgen searches."""
    with spinner() as show:
        yield lambda num_nodes: show(f"searching layouts on {counted(num_nodes, 'node')}")


def _row(found: RunLayouts, name: str, option: str) -> RankedLayout:
    """The layout in a row of the table.

    Raises:
        HpcgenError: there is no such row, or no number of nodes meets the goal.
    """
    if found.chosen is None:
        raise HpcgenError(
            f"{option} {name}: no number of nodes meets the deadline or budget", "give a number with --nodes"
        )
    search = found.chosen.search
    if name == OWN:
        if search.own is None:
            reason = f"the layout of the run file cannot be used on these nodes: {own_mistake(found.chosen)}"
            raise HpcgenError(f"{option} {name}: {reason}", "name a row of the table")
        return search.own
    if int(name) > len(search.best):
        raise HpcgenError(
            f"{option} {name}: the table has only {len(search.best)} rows", "show more with --top"
        )
    return search.best[int(name) - 1]


def _write_page(path: Path, found: RunLayouts) -> None:
    """Writes the page.

    Raises:
        HpcgenError: it cannot be written.
    """
    from hpcgen.report.layouts.page import render_layouts  # needs numpy

    with _progress() as on_search:
        curve = find_curve(found, on_search)
    page = render_layouts(found, curve, time.time())
    with shared_as_directory(path.parent):
        write_output(path, page, mode=0o666)


def _write(config: Path, overrides: tuple[str, ...], found: RunLayouts, layout: RankedLayout) -> None:
    """Writes a layout into the run file, and prints what changes.

    Raises:
        HpcgenError: see `hpcgen.run_plan.layouts.choice.choose`.
    """
    assert found.chosen is not None
    choice = choose(config, overrides, layout, found.chosen.num_nodes, written_reason(found.chosen, layout))
    if not choice.changes:
        click.echo(f"{config} has this layout already", err=True)
        return
    replace_text(config, choice.text)
    for key, (before, after) in choice.changes.items():
        click.echo(f"  {key}: {show(before)} -> {show(after)}", err=True)
    click.echo(f"wrote {config}", err=True)
