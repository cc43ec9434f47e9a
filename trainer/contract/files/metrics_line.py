"""One line of metrics.jsonl, and whether the trainer can have written it. Needs only the standard library."""

from __future__ import annotations

import json
import math
from typing import Any

from trainer.contract.files.metrics_columns import NUMBERS_OF_STEP

Event = dict[str, Any]

_INTEGERS = frozenset(("iteration", "rank", "world_size", "train_iters"))
_NUMBERS = _INTEGERS | {
    *NUMBERS_OF_STEP,
    "slowdown",
    "stall_s",
    "write_s",
    "step_s",
    "process_began",
    "peak_tflops",
    "tokens_per_sample",
}
_TIMES = frozenset(("time", "process_began"))
_TEXTS = frozenset(("split", "host", "reason", "name", "device", "flop_formula", "stage"))
"""Fields of any event with these types."""
_INT64 = 2**63
_LARGEST = 3.5e38
_LATEST = 1e11
"""Latest time in a line, in the year 5138."""


def decode(line: bytes) -> Event | None:
    """Decodes the event in a line; None if the line is not an event, or has a value that the trainer cannot write."""
    try:
        event = json.loads(line)  # reads NaN, which is not valid JSON, as the standard library writes it
        json.dumps(event, ensure_ascii=False).encode()  # refuses unpaired surrogates
    except (ValueError, RecursionError):
        return None
    return checked(event)


def checked(event: object) -> Event | None:
    """`event` if the trainer can have written it, otherwise None."""
    if (
        isinstance(event, dict)
        and isinstance(event.get("event"), str)
        and type(event.get("iteration")) is int
        and event["iteration"] >= 0
        and all(_is_plausible(name, value) for name, value in event.items())
    ):
        return event
    return None


def number_or_none(value: object) -> float | None:
    """Returns `value` if it is a finite number, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):  # a longer one may not fit into a float
        return value if -_INT64 <= value < _INT64 else None
    return value if math.isfinite(value) else None


def _is_plausible(name: str, value: object) -> bool:
    """Returns False for a value that the trainer cannot write under this name.

    Any number may be null. Numbers are at most as large as a float32, and integers have 64 bits.
    """
    if value is None:
        return True
    if name in _TEXTS:
        return isinstance(value, str)
    if isinstance(value, bool):
        return name not in _NUMBERS or name == "skipped"
    if isinstance(value, int):
        return -_INT64 <= value < _INT64 and (name not in _TIMES or 0 <= value < _LATEST)
    if isinstance(value, float):
        is_number = not math.isfinite(value) or abs(value) <= _LARGEST
        return name not in _INTEGERS and is_number and (name not in _TIMES or 0 <= value < _LATEST)
    return name not in _NUMBERS
