"""Prints for `hpcgen explain` the environment variables of a stage, or how two runs differ."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from hpcgen import api
from hpcgen.cli.options import read_run_or_cluster, warn
from hpcgen.config.loader import Run
from hpcgen.errors import HpcgenError
from hpcgen.planning.environment import Variable
from hpcgen.run_plan import explanation, plan, release
from hpcgen.run_plan.explanation import Changes, Comparison, Difference, Explanation
from hpcgen.slurm.rendering.filters import shell_word
from hpcgen.text import counted

GIVEN = ("cluster", "run file", "override")
"""Layers whose values a person set, so the origin is a sufficient reason."""


def show_explanation(
    names: tuple[str, ...],
    config: Path | None,
    cluster: str | None,
    run_dir: str | None,
    overrides: tuple[str, ...],
    stage: str | None,
    other: str | None,
    *,
    as_json: bool,
) -> None:
    """Prints the variables called `names`, or how they differ from OTHER. The options are those of the command.

    Raises:
        HpcgenError: the options conflict, the run file or profile is invalid, or OTHER is not what can be compared.
    """

    def load() -> Run:
        return read_run_or_cluster(config, cluster, run_dir, overrides)

    if other is not None:
        _show_difference(_compare(load, stage, other, cluster), names, as_json)
        return
    run = load()
    explained = explanation.explain(stage or plan.main_stage(run), run)
    warn(explained.warnings)
    here = explanation.leaked(os.environ, explained.secrets, explained.unset)
    chosen = explained.only(names)
    if as_json:
        click.echo(json.dumps(_explanation_json(chosen, here), indent=1))
    else:
        _print_explanation(chosen, here, everything=not names)


def _compare(load: Callable[[], Run], stage: str | None, other: str, cluster: str | None) -> Comparison:
    """The run compared with OTHER: a script, a release, another run file or another profile."""
    from hpcgen.slurm.rendering import rendered  # reads scripts, which only --diff does

    run = load()
    if (script := rendered.find_script(Path(other), stage)) is not None:
        return rendered.compare_with(script, run, api.template_directories(run))
    stage = stage or plan.main_stage(run)
    known = release.release_names()
    if other in known:
        return release.compare_with(other, stage, load)
    if re.fullmatch(r"\d+(\.\d+)+", other) and not Path(other).exists():
        hint = f"use {', '.join(known)}, or a script that it rendered"
        raise HpcgenError(f"--diff {other}: this version has no record", hint)
    before = explanation.explain(stage, _other(other, run, cluster))
    return explanation.Comparison(before=before, after=explanation.explain(stage, run), against=other)


def _other(other: str, run: Run, cluster: str | None) -> Run:
    """The run to compare with: a run file, or a profile with the same run directory."""
    if cluster is None:
        return read_run_or_cluster(Path(other), None, None, ())
    return read_run_or_cluster(None, other, run.config.paths.run_dir, ())


def _show_difference(compared: Comparison, names: tuple[str, ...], as_json: bool) -> None:
    warn(compared.after.warnings)
    difference = explanation.compare(compared.before, compared.after, names)
    changes = None if names else compared.changes
    if as_json:
        click.echo(json.dumps(_difference_json(difference) | _changes_json(changes), indent=1))
    else:
        _print_difference(difference, compared.against)
        _print_changes(changes)
    if compared.unseen:
        click.echo(compared.unseen, err=True)


def _print_changes(changed: Changes | None) -> None:
    """Prints the changes of two scripts, besides the variables that they export."""
    if changed is None:
        return
    titles = {
        "directives": "directives",
        "defaults": "defaults of keys that no file sets",
        "settings": "settings of the script",
        "files": "files of the job",
    }
    for key, title in titles.items():
        if found := getattr(changed, key):
            _print_heading(title)
        for name, change in found.items():
            click.echo(f"{click.style('~ ', fg='yellow')}{click.style(name, bold=True)}")
            for sign, items in (("-", change.removed), ("+", change.added)):
                lines = items if key == "files" else [" ".join(items)] * bool(items)
                for line in lines:
                    click.echo(f"    {sign} {line or 'given'}")
    if changed.functions:
        _print_heading("shell functions that differ")
        _print_text(", ".join(changed.functions), indent=0)


def _print_explanation(explained: Explanation, here: tuple[str, ...], everything: bool) -> None:
    if everything:
        if explained.defaults:
            _print_heading("defaults of the user or the site, which neither the run file nor a profile sets")
        for key, (value, place) in explained.defaults.items():
            _print_text(f"{key}: {value}  {place}", indent=0)
        _print_heading(f"stage {explained.stage} on {explained.cluster}: exported by the script")
    for variable in explained.variables:
        _print_variable(variable)
    if explained.computed:
        _print_heading("set by the script when the job runs")
        for name, how in explained.computed.items():
            _print_text(f"{name}: {how}", indent=0)
    if explained.secrets:
        _print_heading("secrets, inherited from the submitting shell and never written to a file")
        _print_text(", ".join(explained.secrets), indent=0)
    if everything and explained.environment_script:
        _print_heading(
            "set or changed by the nodes' script in the job, unless the profile or the run file sets it"
        )
        _print_text(explained.environment_script, indent=0)
    if everything:
        _print_heading("unset if the submitting shell exports them")
        _print_text(", ".join(explained.unset), indent=0)
        if here:
            _print_text(f"this shell exports {', '.join(here)}", indent=0)
    _print_absent(explained, everything)


def _print_absent(explained: Explanation, everything: bool) -> None:
    """Prints variables that are not set, grouped by the change that would set them. Omits reasons with `everything`."""
    for number, (change, variables) in enumerate(explained.absent_by_change().items()):
        if number == 0:
            _print_heading("not set; these changes would set them")
        if everything:
            _print_text(f"{change}: {', '.join(variable.name for variable in variables)}", indent=0)
            continue
        for variable in variables:
            _print_text(f"{change}: {_assignment(variable)}  {_place(variable)}", indent=0)
            _print_text(variable.why, indent=4)


def _print_variable(variable: Variable, mark: str = "") -> None:
    sign = click.style(mark, fg="green" if mark == "+ " else "red") if mark else ""
    click.echo(f"{sign}{click.style(_assignment(variable), bold=True)}  {_place(variable)}")
    for line in _reasons(variable):
        _print_text(line, indent=len(mark) + 4)


def _reasons(variable: Variable) -> Iterator[str]:
    """Yields the reason for the value, and each value that it overrides with its reason."""
    if variable.layer not in GIVEN:
        yield variable.why
    for hidden in reversed(variable.hides):
        reason = "" if hidden.layer in GIVEN else f": {hidden.why}"
        yield f"overrides {shell_word(hidden.value)} from the {hidden.layer} ({hidden.origin}){reason}"


def _print_difference(difference: Difference, against: str) -> None:
    added, removed, changed = difference.added, difference.removed, difference.changed
    secrets = (*difference.added_secrets, *difference.removed_secrets)
    if not (added or removed or changed or secrets):
        click.echo(
            f"stage {difference.stage}: {counted(difference.same, 'variable')}, identical to {against}"
        )
        return
    _print_heading(f"stage {difference.stage}: differences from {against} ({difference.same} identical)")
    for variable in added:
        _print_variable(variable, mark="+ ")
    for variable in removed:
        _print_variable(variable, mark="- ")
    for was, now in changed:
        click.echo(f"{click.style('~ ', fg='yellow')}{click.style(now.name, bold=True)}")
        for sign, variable in (("-", was), ("+", now)):
            click.echo(f"    {sign} {shell_word(variable.value)}  {_place(variable)}")
            for line in _reasons(variable):
                _print_text(line, indent=8)
    for sign, names in (("+", difference.added_secrets), ("-", difference.removed_secrets)):
        for name in names:
            click.echo(f"{sign} secret {name}")


def _print_heading(text: str) -> None:
    click.secho(f"# {text}", fg="cyan")


def _print_text(text: str, indent: int) -> None:
    """Prints text wrapped to the terminal's width, or on one line if stdout is not a terminal."""
    space = " " * indent
    if not sys.stdout.isatty():
        click.echo(f"{space}{text}")
        return
    width = max(40, shutil.get_terminal_size().columns)
    for line in textwrap.wrap(
        text,
        width,
        initial_indent=space,
        subsequent_indent=space or "    ",
        break_long_words=False,
        break_on_hyphens=False,
    ):
        click.echo(line)


def _assignment(variable: Variable) -> str:
    return f"{variable.name}={shell_word(variable.value)}"


def _place(variable: Variable) -> str:
    return f"{variable.layer}, {variable.origin}"


def _explanation_json(explained: Explanation, here: tuple[str, ...]) -> dict[str, Any]:
    return {
        "stage": explained.stage,
        "cluster": explained.cluster,
        "variables": [dataclasses.asdict(variable) for variable in explained.variables],
        "computed": dict(explained.computed),
        "secrets": list(explained.secrets),
        "environment_script": explained.environment_script,
        "unset": {"patterns": list(explained.unset), "in_this_shell": list(here)},
        "not_set": [
            {"change": item.change, **dataclasses.asdict(item.variable)} for item in explained.absent
        ],
        "warnings": list(explained.warnings),
        "defaults": {
            key: {"value": value, "origin": place} for key, (value, place) in explained.defaults.items()
        },
    }


def _changes_json(changed: Changes | None) -> dict[str, Any]:
    return {} if changed is None else dataclasses.asdict(changed)


def _difference_json(difference: Difference) -> dict[str, Any]:
    return {
        "stage": difference.stage,
        "added": [dataclasses.asdict(variable) for variable in difference.added],
        "removed": [dataclasses.asdict(variable) for variable in difference.removed],
        "changed": [
            {"name": now.name, "before": dataclasses.asdict(was), "after": dataclasses.asdict(now)}
            for was, now in difference.changed
        ],
        "same": difference.same,
        "secrets": {
            "added": list(difference.added_secrets),
            "removed": list(difference.removed_secrets),
        },
    }
