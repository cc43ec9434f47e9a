"""hpcgen doctor: name what is wrong with a run, or check whether a cluster has what a run needs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen import api
from hpcgen.cli.options import json_option, read_run_or_cluster, run_or_cluster_options
from hpcgen.cli.run_argument import run_directory, tell_unread
from hpcgen.errors import HpcgenError
from hpcgen.redaction import redact, redact_json
from hpcgen.text import counted, harmless

if TYPE_CHECKING:
    from hpcgen.cli.doctor_nodes import Load
    from hpcgen.config.loader import Run
    from hpcgen.doctor.cause import Cause
    from hpcgen.doctor.check import Check
    from hpcgen.doctor.run_files import RunFiles

PIPE_WIDTH = 80
COLORS = {
    **{"blocks": "red", "ended": "red", "costs": "yellow", "harmless": "cyan"},
    **{"ok": "green", "warning": "yellow", "failed": "red", "skipped": "cyan"},
}
EFFECTS = {
    "blocks": "the next attempt would fail",
    "ended": "ended the last attempt",
    "costs": "costs time or quality",
    "harmless": "harmless",
}


@click.command("doctor")
@click.argument("run", metavar="[RUN]", required=False, type=click.Path(path_type=Path))
@run_or_cluster_options
@click.option(
    "--nodes",
    metavar="N|LIST",
    help="Also check compute nodes by a job: a number of nodes, or a list such as ndv5-[1-4].",
)
@click.option(
    "--print", "prints", is_flag=True, help="With --nodes: print the script of the job, and do nothing else."
)
@json_option
def command(
    run: Path | None,
    config: Path | None,
    cluster: str | None,
    run_dir: str | None,
    overrides: tuple[str, ...],
    nodes: str | None,
    prints: bool,
    as_json: bool,
) -> int:
    """RUN is a run directory, or a run file with the directory in paths.run_dir. Without it, checks what a run needs.

    With RUN, reads what the run left: markers, events, logs, metrics, checkpoints. Names each cause with its evidence,
    what to do and the page that explains it, the most likely cause first. Exits with status 1 if something stopped the
    run, would stop it, or slows it.

    With -c or --cluster, checks on this login node what the run needs: settings of Slurm, the partition, the container
    runtime and versions known to fail, the image, paths, disk space, tokenizer and secrets. Exits with status 1 if a
    check fails. With --nodes, the stage node-health then checks nodes: devices, GPUs, memlock, paths, scratch, a task
    in the container, and whether versions and clocks are the same on all of them. Ctrl-C cancels the job.
    """
    if prints and nodes is None:
        raise HpcgenError("--print: only with --nodes", "add --nodes 2, whose script it prints")
    given = config is not None or cluster is not None or overrides or run_dir is not None or nodes is not None
    if run is None:

        def load(more: tuple[str, ...] = ()) -> Run:
            return read_run_or_cluster(config, cluster, run_dir, (*overrides, *more))

        return _check(load, nodes, prints=prints, as_json=as_json)
    if given:
        reason = "RUN excludes -c, --cluster, --run-dir, --set and --nodes"
        raise HpcgenError(reason, f"use hpcgen doctor {run} for what happened, or -c for what the run needs")
    return _diagnose(run_directory(run), as_json)


def _check(load: Load, nodes: str | None, *, prints: bool, as_json: bool) -> int:
    from hpcgen.doctor import site
    from hpcgen.doctor.check import any_failed
    from hpcgen.run_plan.plan import main_stage

    run = load(())
    has_stage = any(run.document.get(section) is not None for section in ("model", "program", "data"))
    stage = main_stage(run) if has_stage else "node-health"
    checks = iter(()) if prints else site.checks(run, stage, api.render)
    if nodes is not None:
        from hpcgen.cli.doctor_nodes import check_nodes, plan_of_nodes

        health = plan_of_nodes(load, api.plan(run, [stage]), nodes)
        if prints:
            click.echo(api.render(health, "node-health"), nl=False)
            return 0
        checks = itertools.chain(checks, check_nodes(health))
    shown = list(checks) if as_json else _show_checks(checks)
    if as_json:
        found = {"checks": [dataclasses.asdict(check) for check in shown]}
        click.echo(json.dumps(redact_json(found), indent=1))
    return int(any_failed(shown))


def _show_checks(checks: Iterable[Check]) -> list[Check]:
    """Prints each check when it is done, since some programs take seconds to answer."""
    shown = []
    for check in checks:
        shown.append(check)
        _print(f"{check.state:<8} ", f"{check.name}: {check.found}", COLORS[check.state])
        if check.fix and check.state != "ok":
            _print("         fix: ", check.fix)
    states = [check.state for check in shown]
    counts = [f"{states.count(state)} {state}" for state in ("ok", "warning", "failed", "skipped")]
    click.echo(", ".join(counts))
    return shown


def _diagnose(directory: Path, as_json: bool) -> int:
    from hpcgen.doctor.diagnosis import diagnose
    from hpcgen.doctor.run_files import read_run_files, with_slurm
    from hpcgen.runs.secrets import secrets_of
    from hpcgen.runs.unread import unread_logs, unread_records

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
    click.echo(_safe(_heading(files)))
    if not causes:
        click.echo("nothing found in its markers, events, logs, checkpoints and metrics")
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
    step = f"iteration {int(run.history.iteration[-1]):,}{of}" if run else "no step is recorded"
    state = ", ".join(filter(None, (files.state, step)))
    job = f"; last attempt: job {last.job}, restart {last.restart}" if last else ""
    attempts = f" of {counted(len(files.attempts), 'attempt')}" if len(files.attempts) > 1 else ""
    return f"{files.directory}: {state}{job}{attempts}"


def _safe(text: str) -> str:
    """Text of logs and other files for the terminal, without secrets."""
    return harmless(redact(text))


def _print(label: str, text: str, color: str | None = None) -> None:
    """Prints a paragraph. Paths are not broken, so that they can be copied."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
    paragraph = textwrap.TextWrapper(width - len(label), break_long_words=False, break_on_hyphens=False)
    lines = paragraph.wrap(_safe(text)) or [""]
    click.echo(click.style(label, fg=color, dim=color is None) + lines[0])
    for line in lines[1:]:
        click.echo(" " * len(label) + line)
