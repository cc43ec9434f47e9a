"""Asking a run to stop: a file that rank 0 sees, or a signal to any rank."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType


class StopRequest:
    """Remembers that this rank was asked to stop.

    SIGUSR2 and SIGTERM only set a flag, however often they come. The ranks agree on it in the all-reduce that
    ends each step, so a rank that is asked never waits for one that is gone.
    """

    def __init__(self, stop_file: Path | None) -> None:
        self._stop_file = stop_file
        self._signal: signal.Signals | None = None
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)

    def reason(self) -> str | None:
        """Why this rank should stop; None when it should not. `stop_file` is given to rank 0 alone."""
        if self._signal is not None:
            return self._signal.name
        if self._stop_file is not None and self._stop_file.exists():
            return str(self._stop_file)
        return None
