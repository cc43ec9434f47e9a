"""Reads why an attempt failed from what it left in the run directory."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from hpcgen.config.stages import has_attempts
from hpcgen.logs.evidence import Evidence, collect
from hpcgen.logs.failure import Failure
from hpcgen.logs.lines import parse
from hpcgen.logs.root import NodeOf, find_root
from hpcgen.redaction import redact
from hpcgen.runs.attempts import Event, JobAttempt, read_job
from hpcgen.runs.failed import failed_text
from hpcgen.runs.log_files import WINDOW_BYTES, LogFile, failure_parts, log_files
from hpcgen.runs.secrets import secrets_of
from hpcgen.slurm.job_files import job_directory
from trainer.contract.files.regular_file import open_regular
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.files.shared_files import foreign_link
from trainer.contract.hang_report import describe_hang, read_reports, report_file, report_files
from trainer.contract.record import replaced

_MARKER_BYTES = 64 << 10
_SIGNALED = 128
"""A shell adds the number of the signal to this."""
_CRASHES = frozenset((signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV))
"""Signals whose number alone means a crash. SIGILL's and SIGABRT's are exit statuses of the trainer."""
_ENDS = _CRASHES | {signal.SIGILL, signal.SIGABRT, signal.SIGKILL}
"""Signals that a failed process did not ask for."""
_LEAST_BYTES = 256 << 10
"""Part of each log that is read even if a job has thousands of them."""
_MAIN_THREAD, _ALL_THREADS = "Main thread (most recent call last):", "All threads:"
"""Headings in the report of a rank that hung (trainer.faults.hang)."""


def root_failure(run_dir: Path, attempt: JobAttempt) -> Failure | None:
    """Why an attempt failed. None if it goes on, ended as planned, or left no log.

    Raises:
        OSError: the run directory cannot be read.
    """
    if attempt.verdict in ("done", "stopped") or attempt.planned:
        return None
    later = any(each.restart > attempt.restart for each in read_job(job_directory(run_dir, attempt.job)))
    found = _evidence(log_files(run_dir, attempt), attempt, is_last=not later)
    if attempt.verdict == "requeued":
        # The script asked for it: Slurm's lines about the end of the job are effects.
        found = [each for each in found if each.kind != "canceled"]
    failed = "" if later else _failed_text(run_dir, attempt)
    if not found and not failed:
        found = _without_words(run_dir, attempt, is_last=not later)
    failure = find_root(found, node_of(attempt), failed, num_ranks(attempt))
    if failure is None:
        return None
    traceback = failure.traceback or _stack(run_dir, attempt, failure)
    secrets = secrets_of(run_dir)
    return replaced(failure, message=redact(failure.message, secrets), traceback=redact(traceback, secrets))


def _without_words(run_dir: Path, attempt: JobAttempt, *, is_last: bool) -> list[Evidence]:
    """Evidence of a failure without a line in the logs: reports of a hang, or an exit status that is a signal's."""
    hang = _hang(run_dir, attempt) if is_last else ""
    if hang:
        return list(collect(parse([f"trainer: hung: {hang}"]), "stacks"))
    name = _signal(attempt.status)
    if attempt.verdict not in ("failed", "requeued") or not name:
        return []
    message = f"status {attempt.status} is that of {name}, and no process wrote why"
    kind = "killed" if name == "SIGKILL" else "crash"
    return [Evidence(kind=kind, role="exit", order=0, rank=None, message=message)]


def _hang(run_dir: Path, attempt: JobAttempt) -> str:
    """Report of the ranks about a hang of this attempt; "" if there is none."""
    stacks = RunDirectory.at(run_dir).stacks
    if foreign_link(stacks, run_dir) is not None:
        return ""
    with contextlib.suppress(OSError):
        wrote = max((path.stat().st_mtime for path in report_files(stacks)), default=0.0)
        reports = read_reports(stacks)
        if wrote >= attempt.began and reports:
            return describe_hang(reports, num_ranks(attempt) or None, {})
    return ""


def _signal(status: int | None) -> str:
    """The name of the signal that an exit status means: 128+N, or N alone."""
    names = {int(number): number.name for number in _CRASHES}
    names |= {_SIGNALED + number: number.name for number in _ENDS}
    return "" if status is None else names.get(status, "")


def _stack(run_dir: Path, attempt: JobAttempt, failure: Failure) -> str:
    """Where the rank to look at hung: the stack of its main thread, or that of the first rank that wrote one."""
    stacks = RunDirectory.at(run_dir).stacks
    if failure.kind != "hang" or foreign_link(stacks, run_dir) is not None:
        return ""
    with contextlib.suppress(OSError):
        own = [] if failure.rank is None else [report_file(stacks, failure.rank)]
        for path in (*filter(Path.is_file, own), *report_files(stacks)):
            with open_regular(path) as file:
                if os.fstat(file.fileno()).st_mtime < attempt.began:
                    return ""  # of an earlier attempt
                text = file.read(_MARKER_BYTES).decode(errors="replace")
            stack = text.partition(_MAIN_THREAD)[2].partition(_ALL_THREADS)[0].strip("\n")
            return f"{path.name}:\n{stack}"
    return ""


def node_of(attempt: JobAttempt) -> NodeOf:
    """Tells the node of a rank, as the job launched them: in blocks of the same size."""
    nodes = str(_launch(attempt).get("nodes", "")).split()
    count = num_ranks(attempt)
    if len(nodes) == 1 and "[" not in nodes[0]:
        return lambda rank: nodes[0]
    return lambda rank: nodes[rank * len(nodes) // count] if 0 <= rank < count and nodes else None


def num_ranks(attempt: JobAttempt) -> int:
    """Number of ranks of the last launch; 0 if the job did not record it."""
    with contextlib.suppress(ValueError):
        return int(_launch(attempt).get("ranks", 0))
    return 0


def _launch(attempt: JobAttempt) -> Event:
    launches = [event for event in attempt.events if event["event"] == "launch"]
    return launches[-1] if launches else {}


def _evidence(files: tuple[LogFile, ...], attempt: JobAttempt, *, is_last: bool) -> list[Evidence]:
    """The evidence in all logs of a job. Between files, times decide which came first; within a file, its lines."""
    budget = max(_LEAST_BYTES, WINDOW_BYTES // max(1, len(files)))
    found: list[tuple[float, int, Evidence]] = []
    for number, file in enumerate(files):
        latest = attempt.began
        with contextlib.suppress(OSError):  # it was removed meanwhile
            for part in failure_parts(file, attempt, is_last=is_last, budget=budget):
                lines = parse(part.lines(), file.rank, part.first_line or 1)
                for each in sorted(collect(lines, file.name, part.start), key=lambda each: each.order):
                    latest = max(latest, each.time or latest) if len(files) > 1 else latest
                    each = each if part.first_line else replaced(each, number=0)
                    found.append((latest, number, each))
    found.sort(key=lambda entry: entry[:2])
    return [replaced(each, order=order) for order, (_, _, each) in enumerate(found)]


def _failed_text(run_dir: Path, attempt: JobAttempt) -> str:
    """The text of FAILED, if this attempt wrote it."""
    with contextlib.suppress(OSError):
        written = (run_dir / RunDirectory.FAILED).lstat().st_mtime
        if has_attempts(attempt.stage) and written >= attempt.began - 1:
            return failed_text(run_dir) or ""
    return ""
