"""Progress of a program of the user, found as its batch script finds it (templates/lib/run.sh)."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcgen.runs.attempts import JobAttempt
from trainer.contract.files.regular_file import open_regular
from trainer.contract.record import record

_LOG_BYTES = 256 << 10
"""End of a log that is searched. The script searches 64 MiB, but not every two seconds."""
_SEARCH_S = 5.0
"""Timeout of a search. Others may have written an expression that takes for ever."""
_GROUP = 'IFS= read -r line; [[ $line =~ $1 ]]; echo "${BASH_REMATCH[1]}"'
"""Prints the first group of a match, as the script finds it."""


@record(kw_only=True)
class ProgramProgress:
    """Progress of the last attempt of a program."""

    value: int
    """The largest number that was found so far."""
    began: int
    """The number when the attempt began."""
    source: str
    """Where the number is from: the path, the wildcards or the expression in program.progress."""


def program_progress(run_dir: Path, attempt: JobAttempt) -> ProgramProgress | None:
    """Progress of an attempt, as program.progress defines it; None without such a definition."""
    events = [event for event in attempt.events if event["event"] == "progress"]
    if not events:
        return None
    recorded = [int(value) for event in events if (value := event.get("value", "")).isdecimal()]
    kind, pattern = events[0].get("kind"), events[0].get("pattern", "")
    found: list[int] = []
    if attempt.ended is None:
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            if kind == "file":
                found = _in_file(Path(pattern))
            elif kind == "checkpoints":
                found = list(_in_names(pattern))
            elif kind == "log":
                found = _in_log(run_dir / f"{attempt.stage}-{attempt.job}.log", pattern)
    return ProgramProgress(
        value=max((*found, *recorded), default=0), began=recorded[0] if recorded else 0, source=pattern
    )


def _in_file(path: Path) -> list[int]:
    with open_regular(path) as file:
        return _number(file.readline(64).decode(errors="replace").strip())


def _in_names(pattern: str) -> Iterator[int]:
    """The last number in each name, from the first wildcard on."""
    first = re.search(r"[*?\[]", pattern)
    for path in glob.iglob(pattern):  # noqa: PTH207 # an absolute path, quoted by glob.escape
        if match := re.search(r"([0-9]+)[^0-9]*$", path[first.start() if first else 0 :]):
            yield from _number(match[1])


def _in_log(path: Path, pattern: str) -> list[int]:
    """The first group of the last line that matches."""
    with open_regular(path, buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        end = os.pread(file.fileno(), _LOG_BYTES, max(0, size - _LOG_BYTES))
    lines = _output(["grep", "-aE", "-e", pattern], end).splitlines()
    return (
        _number(_output(["bash", "-c", _GROUP, "bash", pattern], lines[-1]).decode().strip()) if lines else []
    )


def _output(command: Sequence[str], text: bytes) -> bytes:
    """Output of a program about a text."""
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(
        command, input=text, capture_output=True, timeout=_SEARCH_S, env=environment, check=False
    ).stdout


def _number(text: str | None) -> list[int]:
    """The number, unless it is none that the script accepts."""
    return [int(text)] if text and re.fullmatch(r"[0-9]{1,15}", text) else []
