"""Prints the causes that `hpcgen doctor RUN` finds in what a run left."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import click

from hpcgen.cli.paragraph import print_paragraph, safe
from hpcgen.cli.run_argument import tell_unread
from hpcgen.doctor.cause import Cause
from hpcgen.doctor.diagnosis import diagnose
from hpcgen.doctor.run_files import RunFiles, read_run_files, with_slurm
from hpcgen.redaction import redact, redact_json
from hpcgen.runs.secrets import secrets_of
from hpcgen.runs.unread import unread_logs, unread_records
from hpcgen.text import counted

COLORS = {"blocks": "red", "ended": "red", "costs": "yellow", "harmless": "cyan"}
EFFECTS = {
    "blocks": "the next attempt would fail",
    "ended": "ended the last attempt",
    "costs": "costs time or quality",
    "harmless": "harmless",
}


def diagnose_run(directory: Path, *, as_json: bool) -> int:
    """Prints the causes that explain what a run did, the most likely first. Returns the exit status.

    Raises:
        HpcgenError: the run directory cannot be read.
    """
    files = with_slurm(read_run_files(directory, time.time()))
    tell_unread((*unread_records(directory), *unread_logs(directory)))
    secrets = secrets_of(directory)
    causes = [_without_secrets(cause, secrets) for cause in diagnose(files)]
    if as_json:
        click.echo(json.dumps(redact_json(_in_json(files, causes)), indent=1))
    else:
        _show_causes(files, causes)
    return int(any(cause.effect != "harmless" for cause in causes))


def _in_json(files: RunFiles, causes: Sequence[Cause]) -> dict[str, object]:
    return {
        "run_dir": str(files.directory),
        "state": files.state,
        "iteration": int(files.run.history.iteration[-1]) if files.run else None,
        "causes": [dataclasses.asdict(cause) for cause in causes],
    }


def _without_secrets(cause: Cause, secrets: Collection[str]) -> Cause:
    evidence = tuple(redact(each, secrets) for each in cause.evidence)
    return dataclasses.replace(cause, what=redact(cause.what, secrets), evidence=evidence)


def _show_causes(files: RunFiles, causes: Sequence[Cause]) -> None:
    click.echo(safe(_heading(files)))
    if not causes:
        click.echo("nothing found in its markers, events, logs, checkpoints and metrics")
    for number, cause in enumerate(causes, 1):
        click.echo("")
        effect = click.style(f" ({EFFECTS[cause.effect]})", fg=COLORS[cause.effect])
        click.echo(f"{number}. " + click.style(safe(cause.what), bold=True) + effect)
        for line in cause.evidence:
            print_paragraph("   found: ", line)
        print_paragraph("   fix: ", cause.fix)
        print_paragraph("   see: ", f"docs/{cause.page}")


def _heading(files: RunFiles) -> str:
    last, run = files.last, files.run
    of = f" of {run.train_iters:,}" if run and run.train_iters else ""
    step = f"iteration {int(run.history.iteration[-1]):,}{of}" if run else "no step is recorded"
    state = ", ".join(filter(None, (files.state, step)))
    job = f"; last attempt: job {last.job}, restart {last.restart}" if last else ""
    attempts = f" of {counted(len(files.attempts), 'attempt')}" if len(files.attempts) > 1 else ""
    return f"{files.directory}: {state}{job}{attempts}"
