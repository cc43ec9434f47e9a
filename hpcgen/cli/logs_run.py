"""Prints for `hpcgen logs` the root failure of a run and the lines of its ranks, also those that are added."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from pathlib import Path

import click

from hpcgen.cli.run_argument import run_directory, tell_unread
from hpcgen.errors import HpcgenError
from hpcgen.logs.failure import Failure
from hpcgen.logs.lines import Line
from hpcgen.redaction import LineRedactor, redact, redact_json
from hpcgen.runs.attempts import JobAttempt, read_attempts
from hpcgen.runs.failures import num_ranks, root_failure
from hpcgen.runs.log_files import LogFile, attempts_without_events, log_files
from hpcgen.runs.log_lines import Entry, Follower, last_lines
from hpcgen.runs.secrets import secrets_of
from hpcgen.runs.unread import unread_logs, unread_records
from hpcgen.text import few, harmless

POLL_S = 1.0
"""Interval of --follow. Storage on another machine does not report changes, so the files are looked at."""
MAX_TRACEBACK_LINES = 60
"""Lines of the traceback that are shown; --json has all of them."""


def show_logs(
    run: Path,
    stage: str | None,
    task: int | None,
    number: int | None,
    rank: int | None,
    count: int,
    *,
    follow: bool,
    as_json: bool,
) -> None:
    """Prints why an attempt failed and the last `count` lines of its ranks. The options are those of the command.

    Raises:
        HpcgenError: the run file is invalid, or there is no such directory, stage, task, attempt or rank.
    """
    directory = run_directory(run)
    if directory.is_dir():
        tell_unread((*unread_records(directory), *unread_logs(directory)))
    attempts = _attempts(directory, stage, task)
    if follow:
        _follow(directory, attempts, rank, count, as_json)
        return
    attempt = _choose(directory, attempts, number)
    is_last = not any(each.job == attempt.job and each.restart > attempt.restart for each in attempts)
    if rank is not None and 0 < (ranks := num_ranks(attempt)) <= rank:
        raise HpcgenError(f"--rank {rank} does not exist; use 0 to {ranks - 1}", where=directory)
    files = log_files(directory, attempt)
    failure = root_failure(directory, attempt)
    secrets = secrets_of(directory)
    lines = last_lines(files, attempt, count, is_last=is_last, shows=_filter(rank, as_json))
    lines = _redacted(lines, LineRedactor(), secrets)
    if as_json:
        found = {
            "run_dir": str(directory),
            **_attempt_json(attempt),
            "attempt": attempts.index(attempt) + 1,
            "attempts": len(attempts),
            "failure": None if failure is None else dataclasses.asdict(failure),
            "lines": [_line_json(entry) for entry in lines],
        }
        click.echo(json.dumps(redact_json(found, secrets), indent=1))
        return
    position = f"attempt {attempts.index(attempt) + 1} of {len(attempts)}"
    place = f"{attempt.stage} job {attempt.job}, restart {attempt.restart} ({position})"
    click.echo(_safe(f"{place}: {_end(attempt)}", secrets))
    if failure is not None:
        _show_failure(failure, secrets)
    if lines:
        click.echo("")
        _show_lines(lines)


def _attempts(directory: Path, stage: str | None, task: int | None) -> list[JobAttempt]:
    """The attempts of a stage and a task, oldest first."""
    if not directory.is_dir():
        raise HpcgenError("there is no such run directory; name one, or a run file", where=directory)
    recorded: tuple[JobAttempt, ...] = ()
    with contextlib.suppress(OSError):  # the logs themselves may be readable
        recorded = read_attempts(directory)
    found = sorted(
        (*recorded, *attempts_without_events(directory, {each.job for each in recorded})),
        key=lambda each: each.began,
    )
    stages = sorted({each.stage for each in found})
    if stage is None and found:
        stage = found[-1].stage
    chosen = [each for each in found if each.stage == stage]
    if found and not chosen:
        raise HpcgenError(
            f"stage {stage} has no log; the stages with logs are {few(stages)}", where=directory
        )
    if task is not None:
        tasks = [each for each in chosen if each.job.endswith(f"_{task}")]
        if chosen and not tasks:
            raise HpcgenError(f"stage {stage} has no log of task {task}", where=directory)
        chosen = tasks
    return chosen


def _choose(directory: Path, attempts: Sequence[JobAttempt], number: int | None) -> JobAttempt:
    if not attempts:
        raise HpcgenError(
            "no job has written a log yet, or none that can be read; --follow waits for one. "
            "squeue shows why a job is pending",
            where=directory,
        )
    number = -1 if number is None else number
    if number == 0 or not -len(attempts) <= number <= len(attempts):
        raise HpcgenError(f"--attempt {number} does not exist; use 1 to {len(attempts)}", where=directory)
    return attempts[number - 1 if number > 0 else number]


def _filter(rank: int | None, as_json: bool) -> Callable[[Line], bool]:
    """Chooses the lines of a rank. For people, leaves out the stack of C++ that torch prints for each error."""
    return lambda line: (
        (rank is None or line.rank == rank) and (as_json or not line.text.startswith("frame #"))
    )


def _follow(directory: Path, attempts: list[JobAttempt], rank: int | None, count: int, as_json: bool) -> None:
    """Prints the last lines and those that are added, until the newest attempt is over for good."""
    stage = attempts[-1].stage if attempts else None
    newest = attempts[-1] if attempts else None

    def newest_files() -> tuple[LogFile, ...]:
        return () if newest is None else log_files(directory, newest)

    shows, redactor = _filter(rank, as_json), LineRedactor()

    def show(entries: Sequence[Entry]) -> None:
        shown = [entry for entry in entries if shows(entry.line)]
        _print_followed(_redacted(shown, redactor, secrets_of(directory)), as_json)

    follower = Follower(newest_files, newest.began if newest else 0.0)
    has_grown = True
    try:
        if newest is not None:
            show(last_lines(newest_files(), newest, count, is_last=True, shows=shows))
        while newest is None or not _is_over(newest) or has_grown:
            newest = next(iter(_attempts(directory, stage, None)[-1:]), newest)
            entries = follower.poll()
            has_grown = bool(entries)
            show(entries)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return
    finally:
        follower.close()
    _show_end(directory, newest, as_json)


def _is_over(attempt: JobAttempt) -> bool:
    """True if no other attempt follows. After most other ends by Slurm, the job starts again."""
    return attempt.verdict in ("done", "stopped", "failed") or attempt.cause == "canceled"


def _show_end(directory: Path, attempt: JobAttempt, as_json: bool) -> None:
    """After the last line of a run: how it ended."""
    failure, secrets = root_failure(directory, attempt), secrets_of(directory)
    if as_json:
        found = {
            **_attempt_json(attempt),
            "failure": None if failure is None else dataclasses.asdict(failure),
        }
        click.echo(json.dumps(redact_json(found, secrets)))
        return
    end = f"\n{attempt.stage} job {attempt.job}, restart {attempt.restart}: {_end(attempt)}"
    click.echo(_safe(end, secrets))
    if failure is not None:
        _show_failure(failure, secrets)


def _print_followed(entries: Sequence[Entry], as_json: bool) -> None:
    if as_json:
        for entry in entries:
            click.echo(json.dumps(_line_json(entry)))
    else:
        _show_lines(entries)


def _end(attempt: JobAttempt) -> str:
    """How an attempt ended, in words."""
    if attempt.verdict is None:
        return "no end is recorded: it is running, or its script was killed"
    if attempt.reason.startswith(attempt.verdict):
        return attempt.reason
    return f"{attempt.verdict}: {attempt.reason}" if attempt.reason else attempt.verdict


def _show_failure(failure: Failure, secrets: Collection[str]) -> None:
    """The root failure, its traceback, what followed, and the page about it."""
    where = [f"rank {failure.rank}"] if failure.rank is not None else []
    where += [f"node {failure.node}"] if failure.node else []
    where += [f"{datetime.fromtimestamp(failure.time):%Y-%m-%d %H:%M:%S}"] if failure.time else []
    where += [failure.place] if failure.place else []
    others = len(failure.ranks) - 1
    click.echo("")
    click.secho(_safe(f"root failure: {failure.title}", secrets), fg="red", bold=True)
    if where:
        click.echo(_safe(f"  {', '.join(where)}", secrets))
    if others > 0:
        click.echo(f"  the same on {others} more rank{'s' * (others > 1)}")
    click.echo(click.style(_safe(f"  {failure.message}", secrets), bold=True))
    shown = failure.traceback.splitlines()
    if len(shown) > MAX_TRACEBACK_LINES:
        half = MAX_TRACEBACK_LINES // 2
        shown = [*shown[:half], f"... {len(shown) - 2 * half} lines ...", *shown[-half:]]
    for line in shown:
        click.echo(_safe(f"    {line}", secrets))
    for consequence in failure.cascade:
        click.secho(f"  + {consequence}", dim=True)
    if failure.fix:
        click.echo(f"  see docs/{failure.fix}")


def _show_lines(entries: Iterable[Entry]) -> None:
    for entry in entries:
        label = "" if entry.line.rank is None else click.style(f"{entry.line.rank}: ", dim=True)
        click.echo(label + harmless(entry.line.text, keep="\t"))


def _redacted(entries: Sequence[Entry], redactor: LineRedactor, secrets: Collection[str]) -> list[Entry]:
    """The lines without secrets. The lines of a rank belong together."""
    texts = redactor.redact(
        [((entry.file_number, entry.line.rank), entry.line.text) for entry in entries], secrets
    )
    return [
        entry._replace(line=entry.line._replace(text=text))
        for entry, text in zip(entries, texts, strict=True)
    ]


def _line_json(entry: Entry) -> dict[str, object]:
    line = entry.line
    return {"time": entry.time, "rank": line.rank, "file": entry.file.name, "text": line.text}


def _attempt_json(attempt: JobAttempt) -> dict[str, object]:
    return {
        "job": attempt.job,
        "restart": attempt.restart,
        "stage": attempt.stage,
        "began": attempt.began,
        "ended": attempt.ended,
        "verdict": attempt.verdict,
        "reason": attempt.reason,
    }


def _safe(text: str, secrets: Collection[str]) -> str:
    """Text of logs for the terminal, without secrets."""
    return harmless(redact(text, secrets), keep="\t\n")
