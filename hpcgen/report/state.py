"""Whether a run goes on, and what became of it when it does not: from the marks in its directory, without the job."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hpcgen.report.hang import hang_in_words, hung_at
from hpcgen.report.history import History, number_or_none
from hpcgen.report.words import duration

State = Literal["done", "stopped", "failed", "hung", "died", "running", "silent"]

SILENT_S = 900.0
"""A run that has written nothing for so long hangs, waits in the queue, or is gone: a collective may take 600 s."""
SILENT_STEPS = 20.0
"""Nor is a run silent before so many of its steps would have fitted into the time."""
_MARKERS: dict[str, State] = {"DONE": "done", "FAILED": "failed", "STOPPED": "stopped"}
"""DONE first: FAILED next to it is of an attempt that asked a finished run for something else."""


def state_of(directory: Path, history: History, now: float) -> tuple[State, str]:
    """The state at the time `now`, and why it is so: the reason of a failure, or the last sign of life."""
    for marker, state in _MARKERS.items():
        with contextlib.suppress(OSError):
            text = (directory / marker).read_text(encoding="utf-8", errors="replace").strip()
            return state, text if state == "failed" else ""
    if _has_hung(directory / "stacks", history):
        said = hang_in_words(directory / "stacks", history.start.get("world_size"))
        return "hung", said or "the files of its ranks say where"
    beat = _heartbeat(directory)
    words = [history.attempts[-1].last_time if history.attempts else None, number_or_none(beat.get("time"))]
    last = max((word for word in words if word is not None), default=None)
    iteration = int(
        max(history.iteration[-1], number_or_none(beat.get("iteration")) or 0)
    )  # a beat may be 10 s old
    place = f"{beat.get('phase')} on {beat.get('host')}, iteration {iteration}" if beat else ""
    ago = f"last sign of life {duration(max(0.0, now - last))} ago" if last is not None else ""
    sign = ": ".join(filter(None, (ago, place)))
    if _is_gone(beat):
        reason = history.attempts[-1].stop_reason if history.attempts else None
        said = f"it said last: {reason}" if reason else "ended without a word: killed or a fault"
        return "died", f"{said}; the log says more; {sign}"
    step = history.columns["step_time_s"][-1]
    limit = max(SILENT_S, SILENT_STEPS * step if np.isfinite(step) else 0)
    return "silent" if last is None or now - last > limit else "running", sign


def _has_hung(stacks: Path, history: History) -> bool:
    """Whether ranks left their stacks after the last attempt's last step."""
    wrote = hung_at(stacks)
    began = history.attempts[-1].began if history.attempts else None
    return wrote is not None and wrote > max(np.nan_to_num(history.columns["time"][-1]), began or 0.0)


def _is_gone(beat: dict[str, Any]) -> bool:
    """Whether rank 0 ran on this machine and does not any more. Of other machines nothing is known."""
    pid = beat.get("pid")
    if beat.get("host") != socket.gethostname() or type(pid) is not int or pid < 1:
        return False
    try:
        os.kill(pid, 0)  # asks, and sends nothing
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # somebody else's, and so it is there
        return False
    return False


def _heartbeat(directory: Path) -> dict[str, Any]:
    """Where rank 0 was last; empty when that is not known."""
    try:
        beat = json.loads((directory / "heartbeat").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return beat if isinstance(beat, dict) else {}
