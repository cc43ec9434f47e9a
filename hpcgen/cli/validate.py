"""hpcgen validate: report every mistake in a run, or summarize what it would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hpcgen import api
from hpcgen.cli.options import StageChoice, run_options, stage_list, strict_option, warn
from hpcgen.errors import FilePlace, HpcgenError, Problem
from hpcgen.text import counted


@click.command("validate", epilog=stage_list())
@click.argument("stages", nargs=-1, type=StageChoice(), metavar="[STAGE]...")
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print the summary or the mistakes as JSON.")
@click.option(
    "--storage",
    "with_storage",
    is_flag=True,
    help="Also compare file systems for the checkpoints of a training run.",
)
@strict_option
def command(
    stages: tuple[str, ...],
    config: Path,
    overrides: tuple[str, ...],
    as_json: bool,
    with_storage: bool,
    strict: bool,
) -> None:
    """Default for STAGE: train, run for a run file with a program, or prepare for a run file with only a corpus.

    Exits with status 2 if there are mistakes. With --strict, warnings also count, except those about files that only
    the cluster has or that are not made yet.
    """
    from hpcgen.run_plan import storage_summary, summary
    from hpcgen.slurm.corpus import check_pairs

    try:
        plan = api.plan(api.load_run(config, overrides), stages)
        check_pairs(plan)
        if with_storage and plan.training is None:
            raise HpcgenError(
                "--storage compares file systems for training, which is not planned", "add the stage train"
            )
    except HpcgenError as error:
        if as_json:
            mistakes = [_in_json(mistake) for mistake in error.mistakes]
            click.echo(json.dumps({"mistakes": mistakes, "warnings": []}, indent=1))
        raise
    found = summary.summarize(plan)
    if as_json:
        click.echo(json.dumps({**found, "mistakes": []}, indent=1))
    else:
        warn(found["warnings"])
        for heading, text in summary.for_people(found):
            click.echo(f"{heading:<15}  {text}")
        if with_storage:
            click.echo("\n" + "\n".join(storage_summary.table_for_people(found)))
    refused = [warning for warning in found["warnings"] if warning not in plan.unchecked]
    if strict and refused:
        raise HpcgenError(f"--strict refuses {counted(len(refused), 'warning')}")


def _in_json(mistake: Problem) -> dict[str, Any]:
    """The parts of a mistake. The file is null for --set, presets and defaults."""
    place = mistake.where if isinstance(mistake.where, FilePlace) else None
    return {
        "key": mistake.path or None,
        "value": mistake.value,
        "file": place and place.file,
        "line": place and place.line,
        "reason": mistake.reason,
        "hint": mistake.hint or None,
    }
