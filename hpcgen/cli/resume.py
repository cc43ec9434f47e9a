"""hpcgen resume: submit a run again, as its last job was submitted."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.cli import submit
from hpcgen.cli.options import override_option, warn
from hpcgen.cli.run_argument import directory_in, run_directory
from hpcgen.errors import HpcgenError
from hpcgen.text import harmless

if TYPE_CHECKING:
    from hpcgen.slurm.submission import Submission


@click.command("resume")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@override_option
@click.option("-y", "--yes", is_flag=True, help="Resume a run that has failed, although nothing has changed.")
@click.option("--dry-run", is_flag=True, help="Plan and check everything without submitting.")
@click.pass_context
def command(context: click.Context, run: Path, overrides: tuple[str, ...], yes: bool, dry_run: bool) -> None:
    """RUN is a run directory or a run file.

    Submits the training or the program with the run file, the values of --set and the templates of its last job, where
    that job ran: in Slurm or on this machine. --set adds values. The run continues from its newest checkpoint.
    """
    from hpcgen.runs import control, resuming

    directory = run_directory(run)
    resuming.require_no_job(control.find_jobs(directory))
    if resuming.is_done(directory) and not overrides:
        click.echo("nothing to resume: the run is done; to train longer: --set training.train_iters=NUMBER")
        return
    last = resuming.last_job(directory)
    _require_known(last.submission, overrides)
    _require_same(directory, last.submission, overrides)
    if reason := resuming.failure(directory):
        _confirm(reason, is_changed=bool(overrides), yes=yes)
    context.invoke(
        submit.command,
        stages=(last.submission.stage,),
        config=Path(last.submission.run_file),
        overrides=(*last.submission.overrides, *overrides),
        templates=tuple(map(Path, last.submission.templates)),
        launcher="local" if last.is_local else "slurm",
        dry_run=dry_run,
    )


def _require_known(submission: Submission, overrides: tuple[str, ...]) -> None:
    """Checks that the run file exists and that all values are known, and warns if the file has changed.

    Raises:
        HpcgenError: they are not.
    """
    file = Path(submission.run_file)
    if not file.is_file():
        hint = f"submit the run with its new path: hpcgen submit {submission.stage} -c run.yaml"
        raise HpcgenError("the run file of the last job does not exist", hint, where=file)
    if missing := set(submission.withheld) - {each.partition("=")[0] for each in overrides}:
        keys = ", ".join(sorted(missing))
        hint = "add --set with the value of each"
        raise HpcgenError(
            f"the last job had values that are not recorded, since they may be secret: {keys}", hint
        )
    if hashlib.sha256(file.read_bytes()).hexdigest() != submission.sha256:
        warn([f"{file} has changed since the script of the last job was made"])


def _require_same(directory: Path, submission: Submission, overrides: Sequence[str]) -> None:
    """Refuses a run file that now names another directory. Its jobs were not looked for, and its checkpoints differ.

    Raises:
        HpcgenError: it names another one, or is invalid.
    """
    file = Path(submission.run_file)
    named = directory_in(file, (*submission.overrides, *overrides))
    if named.resolve() != directory.resolve():
        hint = (
            f"to continue here, add --set paths.run_dir={shlex.quote(str(directory.absolute()))}; "
            f"to start a run there, use hpcgen submit {submission.stage}"
        )
        raise HpcgenError(
            f"paths.run_dir is {named}, but the run to resume is in {directory.absolute()}", hint, where=file
        )


def _confirm(reason: str, *, is_changed: bool, yes: bool) -> None:
    """Refuses to repeat an attempt that failed for a reason that stays, unless the user says so.

    Raises:
        HpcgenError: nothing has changed, and nobody can be asked.
    """
    click.echo(f"the run has failed: {harmless(reason, keep=chr(10))}", err=True)
    if is_changed or yes:
        return
    if not sys.stdin.isatty():
        raise HpcgenError(
            "the run would fail again in the same way",
            "change what the reason names with --set, or in the run file; --yes resumes then",
        )
    click.confirm("is the cause corrected, so that the run can resume?", abort=True)
