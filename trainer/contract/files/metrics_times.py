"""Times in the lines of metrics.jsonl: what a line says about the time since the previous line of its attempt."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.contract.files.regular_file import open_regular

PAUSES = ("startup_s", "evaluation_s", "save_s", "recording_s")
"""Keys for the time between steps: before the first step, for evaluations, for saves, and for recording profiles and
CUDA graphs. A line without a pause has no key."""
TIMES = ("steps_s", "data_wait_s", *PAUSES)
"""Keys of `times_of`. The steps include their waiting for data."""


NOTE_BYTES = 512
"""Length of the file with the last step. Each note replaces all bytes of the previous one."""


def times_of(entry: Mapping[str, Any]) -> dict[str, float]:
    """Seconds since the previous line by kind: the steps, the part of them that waited for data, and the pauses.

    `entry` is a line, or the sums over several lines that this function returned.
    """
    if "steps_s" in entry:
        return {name: _number(entry, name) for name in TIMES}
    steps = _number(entry, "steps")
    found = {
        "steps_s": steps * _number(entry, "step_time_s"),
        "data_wait_s": steps * _number(entry, "data_wait_s"),
    }
    return found | {name: _number(entry, name) for name in PAUSES}


def read_note(last_step: Path) -> dict[str, Any] | None:
    """The note about the last step, which metrics.jsonl may have no line for yet; None if there is none."""
    try:
        with open_regular(last_step) as file:
            entry = json.loads(file.read(NOTE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or type(entry.get("iteration")) is not int or not _number(entry, "time"):
        return None
    return entry


def _number(entry: Mapping[str, Any], name: str) -> float:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        return 0.0
    return float(value)
