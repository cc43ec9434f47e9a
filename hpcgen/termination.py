"""What SIGTERM does to a command that has processes of its own."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any, NoReturn


@contextlib.contextmanager
def term_exits() -> Iterator[None]:
    """SIGTERM, from Slurm, `timeout` or `kill`, unwinds this process with SystemExit, so that what it began ends first.

    By default it would end this process alone, and leave its children and private files behind.
    """

    def leave(signal_number: int, frame: Any) -> NoReturn:
        raise SystemExit(128 + signal_number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
