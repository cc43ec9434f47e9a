"""Plans and submits the points of `hpcgen sweep`, and prints their states and results."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import click

from hpcgen import api
from hpcgen.cli.options import read_absolute, short_path, warn
from hpcgen.cli.progress import shown_progress
from hpcgen.cli.terminal import new_table, print_table, spinner
from hpcgen.errors import HpcgenError, JobStopped
from hpcgen.report.words import count_in_short, figure
from hpcgen.runs.slurm import Queue, ask_queue
from hpcgen.sweeps.assignments import points_of, read_points
from hpcgen.sweeps.comparison import Comparison, Metric, Result, compare_runs
from hpcgen.sweeps.points import DIRECTORY, Point, Sweep, plan_sweep, require_all
from hpcgen.sweeps.states import PointState, states_of, unfinished
from hpcgen.text import counted, harmless

WIDTH = 80
"""Width of tables in pipes."""


def run_sweep(
    config: Path,
    overrides: tuple[str, ...],
    file: Path | None,
    launcher: Literal["slurm", "local"],
    metric: Metric | None,
    templates: tuple[Path, ...],
    *,
    paired: bool,
    max_running: int | None,
    retry: bool,
    dry_run: bool,
    results: bool,
    as_json: bool,
) -> None:
    """Submits the points that are missing, or prints their states (`dry_run`) or results.

    Raises:
        HpcgenError: options exclude each other, a point is invalid, or there are no earlier points.
    """
    if metric is not None and not results:
        raise HpcgenError("--metric is for --results", "add --results")
    if results and file is None and not any("," in each for each in overrides):
        _show_results(_earlier(config, overrides), metric, as_json=as_json)
        return
    sweep = _planned(config, overrides, file, paired=paired)
    if results:
        _show_results(sweep.directories, metric, as_json=as_json)
        return
    warn(dict.fromkeys(warning for point in unfinished(sweep) for warning in point.plan.warnings))
    if dry_run:
        require_all(unfinished(sweep), lambda point: api.require_submittable(point.plan, launcher))
        with spinner() as show:
            for number, point in enumerate(sweep.points, 1):
                show(f"checking the script of point {number} of {len(sweep.points)}")
                for stage in point.plan.stages:
                    api.render(point.plan, stage, templates)
        _show_states(sweep, launcher, as_json=as_json)
        return
    _submit(sweep, launcher, templates, max_running=max_running, retry=retry, as_json=as_json)


def _planned(config: Path, overrides: Sequence[str], file: Path | None, *, paired: bool) -> Sweep:
    if file is not None and paired:
        raise HpcgenError("--zip and --points exclude each other", "use only one of them")
    shared, points = points_of(overrides, paired=paired) if file is None else (overrides, read_points(file))
    with spinner() as show:
        return plan_sweep(
            config, shared, points, lambda number: show(f"planning point {number} of {len(points)}")
        )


def _earlier(config: Path, overrides: Sequence[str]) -> dict[str, Path]:
    """The directories of all points of the run file, by their names.

    Raises:
        HpcgenError: there are none.
    """
    directory = Path(read_absolute(config, overrides).paths.run_dir) / DIRECTORY
    found = {path.name: path for path in sorted(directory.glob("*")) if path.is_dir()}
    if not found:
        hint = "name points with --set or --points to start them"
        raise HpcgenError("has no points of a sweep", hint, where=directory)
    return found


def _submit(
    sweep: Sweep,
    launcher: Literal["slurm", "local"],
    templates: Sequence[Path],
    *,
    max_running: int | None,
    retry: bool,
    as_json: bool,
) -> None:
    """Submits what is missing, and prints job ID, point and directory of each."""
    submitted = []
    try:
        with shown_progress() if launcher == "local" else contextlib.nullcontext() as on_progress:
            for each in api.submit_sweep(
                sweep, launcher, templates, on_progress, max_running=max_running, retry=retry
            ):
                if each.state != "submitted":
                    _say_left_out(each)
                    continue
                submitted.append({**_point_in_json(each.point), "job": each.job})
                if not as_json:
                    click.echo(f"{each.job} {each.point.name} {short_path(each.point.directory)}")
    except JobStopped:
        raise SystemExit(130) from None
    finally:
        if as_json:
            click.echo(json.dumps({"submitted": submitted}, indent=1))


def _say_left_out(state: PointState) -> None:
    """Prints to stderr why no job was submitted for a point."""
    name = state.point.name
    if state.state == "failed":
        click.echo(harmless(f"{name}: failed: {state.detail}; --retry repeats it"), err=True)
    elif state.state == "in the queue":
        click.echo(harmless(f"{name}: job {state.job} {state.detail}"), err=True)
    else:
        click.echo(f"{name}: {state.state}", err=True)


def _states(sweep: Sweep, launcher: str) -> tuple[PointState, ...]:
    """The states of all points. If Slurm does not answer, a warning says so."""
    queue = ask_queue([os.geteuid()]) if launcher == "slurm" else Queue()
    if queue.problem:
        warn([f"jobs in the queue are not shown: {queue.problem}"])
    return states_of(sweep, queue)


def _show_states(sweep: Sweep, launcher: str, *, as_json: bool) -> None:
    """Prints all points and their states."""
    states = _states(sweep, launcher)
    if as_json:
        document = [
            {**_point_in_json(each.point), "state": each.state, "job": each.job or None} for each in states
        ]
        click.echo(json.dumps({"points": document}, indent=1))
        return
    table = new_table()
    for head in ("point", "state", "directory"):
        table.add_column(head, overflow="fold")
    for each in states:
        job = f", job {each.job}" if each.job else ""
        table.add_row(each.point.name, f"{each.state}{job}", short_path(each.point.directory))
    print_table(table, WIDTH, is_plain=True)
    missing = sum(each.state == "missing" for each in states)
    click.echo(
        f"dry run: would submit {counted(missing, 'job')} for {counted(len(states), 'point')}", err=True
    )


def _point_in_json(point: Point) -> dict[str, Any]:
    return {"name": point.name, "values": list(point.assignments), "run_dir": str(point.directory)}


def _show_results(directories: dict[str, Path], metric: Metric | None, *, as_json: bool) -> None:
    found = compare_runs(directories, metric)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found), indent=1))
        return
    _print_comparison(found)


def _print_comparison(found: Comparison) -> None:
    what = "validation" if found.metric == "valid" else "training"
    table = new_table()
    table.add_column("point", overflow="fold")
    table.add_column("state")
    for head in ("iteration", "tokens", f"{what} loss", "tokens/s"):
        table.add_column(head, justify="right")
    for each in found.results:
        table.add_row(
            harmless(each.name),
            each.state,
            _iterations(each),
            count_in_short(each.tokens),
            figure(each.loss),
            count_in_short(each.tokens_per_s),
        )
    print_table(table, WIDTH, is_plain=True)
    if found.tokens is not None:
        click.echo(f"losses after {count_in_short(found.tokens)} tokens, the lowest first", err=True)
    for each in found.results:
        if each.reason:
            click.echo(harmless(f"{each.name}: {each.reason}"), err=True)


def _iterations(result: Result) -> str:
    of = f" of {result.train_iters:,}" if result.train_iters else ""
    return f"{result.iteration:,}{of}" if result.iteration else "–"
