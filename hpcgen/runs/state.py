"""States of runs and of their attempts. `state_of` finds a run's in its directory, without querying Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any, Literal

from hpcgen.redaction import redact
from hpcgen.runs.latest import Latest
from hpcgen.runs.secrets import secrets_of
from hpcgen.text import duration
from trainer.contract.files.metrics_line import number_or_none
from trainer.contract.files.regular_file import read_text
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.files.shared_files import foreign_link
from trainer.contract.hang_report import describe_hang, read_reports, report_files
from trainer.contract.wording import STOPPED_EARLY

RunState = Literal["new", "waiting", "running", "silent", "hung", "stopped", "died", "failed", "done"]
"""new: no job has started. silent: no sign of activity for 15 minutes. died: it ended without a verdict of its own."""

State = Literal["done", "stopped", "failed", "hung", "died", "running", "silent"]
"""The states that the run directory alone shows."""

AttemptState = Literal["running", "killed", "unknown", "done", "requeued", "stopped", "terminated", "failed"]
"""The verdict of the job's script. Without one: running, killed, or unknown if Slurm does not answer."""

SILENT_S = 900.0
"""Seconds without output after which a run counts as silent: hung, queued, or dead. A collective may take 600 s."""
SILENT_STEPS = 20.0
"""Number of steps whose duration replaces SILENT_S if it is longer."""
_MARKERS: dict[str, State] = {
    RunDirectory.DONE: "done",
    RunDirectory.FAILED: "failed",
    RunDirectory.STOPPED: "stopped",
}
"""DONE comes first: a FAILED file next to it is from an attempt to start a finished run with other settings."""


def state_of(directory: Path, latest: Latest, now: float) -> tuple[State, str]:
    """Determines the state at the time `now`, with the reason for a failure or the last sign of activity, without
    secrets.
    """
    state, word = _state_of(directory, latest, now)
    return state, redact(word, secrets_of(directory)) if word else ""


def _state_of(directory: Path, latest: Latest, now: float) -> tuple[State, str]:
    for marker, state in _MARKERS.items():
        link = foreign_link(directory / marker, directory)
        if link is not None:  # its target may be private, and others can read the report
            return state, f"{link} is a symbolic link that another user placed, and was not followed"
        with contextlib.suppress(OSError):
            text = read_text(directory / marker, errors="replace").strip()
            return state, text if state == "failed" else _why_done(text) if state == "done" else ""
    stacks = RunDirectory.at(directory).stacks
    if _has_hung(stacks, latest):
        return "hung", _hang(stacks, latest.start.get("world_size"))
    beat = _heartbeat(directory)
    times = [latest.last_time, number_or_none(beat.get("time"))]
    last = max((time for time in times if time is not None), default=None)
    reached = number_or_none(beat.get("iteration")) or 0
    iteration = int(max(latest.iteration or 0, reached))  # a heartbeat may be 10 s old
    place = f"{beat.get('phase')} on {beat.get('host')}, iteration {iteration}" if beat else ""
    ago = f"last activity {duration(max(0.0, now - last))} ago" if last is not None else ""
    sign = ": ".join(filter(None, (ago, place)))
    if process_is_gone(beat.get("host"), beat.get("pid")):
        if beat.get("phase") == "end":  # it saved; the job of the next attempt has removed STOPPED
            return "stopped", sign
        reason = latest.stop_reason
        cause = (
            f"its last message: {reason}" if reason else "ended without a message: it was killed or crashed"
        )
        return "died", f"{cause}; see the log; {sign}"
    step = number_or_none(latest.step.get("step_time_s")) or 0.0
    is_silent = last is None or now - last > max(SILENT_S, SILENT_STEPS * step)
    return "silent" if is_silent else "running", sign


def _why_done(text: str) -> str:
    """Why DONE says that the run ended before its last iteration; empty if it did not."""
    return next((line for line in text.splitlines() if line.startswith(STOPPED_EARLY)), "")


def _has_hung(stacks: Path, latest: Latest) -> bool:
    """Returns whether ranks wrote their stacks after the last step of the last attempt."""
    try:
        wrote = max((path.stat().st_mtime for path in report_files(stacks)), default=0.0)
    except OSError:  # a new attempt has just moved them, or they may not be read
        return False
    times = (number_or_none(event.get("time")) for event in (latest.start, latest.step))
    return wrote > max((time for time in times if time is not None), default=0.0)


def _hang(stacks: Path, world_size: object) -> str:
    """Describes the hang, as the trainer's log does."""
    reports = read_reports(stacks)
    if not reports:
        return f"see the stacks of its ranks in {stacks}"
    return describe_hang(reports, world_size if isinstance(world_size, int) else None, {})


def process_is_gone(host: object, pid: object) -> bool:
    """Returns whether a process ran on this machine and has ended. Processes on other machines cannot be checked."""
    number = int(pid) if isinstance(pid, str) and pid.isdecimal() else pid
    if host != socket.gethostname() or type(number) is not int or number < 1:
        return False
    try:
        os.kill(number, 0)  # only checks for existence
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # the process exists but belongs to another user
        return False
    return False


def _heartbeat(directory: Path) -> dict[str, Any]:
    """Last heartbeat of rank 0; empty if there is none."""
    try:
        beat = json.loads(read_text(directory / RunDirectory.HEARTBEAT))
    except (OSError, ValueError):
        return {}
    return beat if isinstance(beat, dict) else {}
