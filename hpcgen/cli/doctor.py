"""hpcgen doctor: name what is wrong with a run."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.cli.options import json_option
from hpcgen.cli.run_argument import run_directory
from hpcgen.redaction import redact, redact_json
from hpcgen.text import counted, harmless

if TYPE_CHECKING:
    from hpcgen.doctor.cause import Cause
    from hpcgen.doctor.run_files import RunFiles

PIPE_WIDTH = 80
COLORS = {"blocks": "red", "ended": "red", "costs": "yellow", "harmless": "cyan"}
EFFECTS = {
    "blocks": "the next attempt would fail",
    "ended": "ended the last attempt",
    "costs": "costs time or quality",
    "harmless": "harmless",
}


@click.command("doctor")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@json_option
def command(run: Path, as_json: bool) -> int:
    """RUN is a run directory, or a run file with the directory in paths.run_dir.

    Reads what the run left: markers, events, logs, metrics, checkpoints. Names each cause with its evidence, what to do
    and the page that explains it, the most likely cause first. Changes nothing. Exits with status 1 if something
    stopped the run, would stop it, or slows it.
    """
    from hpcgen.doctor.diagnosis import diagnose
    from hpcgen.doctor.run_files import read_run_files, with_slurm

    files = with_slurm(read_run_files(run_directory(run), time.time()))
    causes = diagnose(files)
    if as_json:
        click.echo(json.dumps(redact_json(_in_json(files, causes)), indent=1))
    else:
        _show(files, causes)
    return int(any(cause.effect != "harmless" for cause in causes))


def _in_json(files: RunFiles, causes: Sequence[Cause]) -> dict[str, object]:
    return {
        "run_dir": str(files.directory),
        "state": files.run.state if files.run else None,
        "iteration": int(files.run.history.iteration[-1]) if files.run else None,
        "causes": [dataclasses.asdict(cause) for cause in causes],
    }


def _show(files: RunFiles, causes: Sequence[Cause]) -> None:
    click.echo(_safe(_heading(files)))
    if not causes:
        click.echo("nothing found in its markers, events, checkpoints and metrics")
    for number, cause in enumerate(causes, 1):
        click.echo("")
        effect = click.style(f" ({EFFECTS[cause.effect]})", fg=COLORS[cause.effect])
        click.echo(f"{number}. " + click.style(_safe(cause.what), bold=True) + effect)
        for line in cause.evidence:
            _print("   found: ", line)
        _print("   fix: ", cause.fix)
        _print("   see: ", f"docs/{cause.page}")


def _heading(files: RunFiles) -> str:
    last, run = files.last, files.run
    of = f" of {run.train_iters:,}" if run and run.train_iters else ""
    state = f"{run.state}, iteration {int(run.history.iteration[-1]):,}{of}" if run else "no step is recorded"
    job = f"; last attempt: job {last.job}, restart {last.restart}" if last else ""
    attempts = f" of {counted(len(files.attempts), 'attempt')}" if len(files.attempts) > 1 else ""
    return f"{files.directory}: {state}{job}{attempts}"


def _safe(text: str) -> str:
    """Text of logs and other files for the terminal, without secrets."""
    return harmless(redact(text))


def _print(label: str, text: str) -> None:
    """Prints a paragraph. Paths are not broken, so that they can be copied."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
    lines = textwrap.wrap(
        _safe(text), width - len(label), break_long_words=False, break_on_hyphens=False
    ) or [""]
    click.echo(click.style(label, dim=True) + lines[0])
    for line in lines[1:]:
        click.echo(" " * len(label) + line)
