"""Lines in the log that show how far an evaluation is."""

from __future__ import annotations

import time

from trainer.contract.wording import counted, duration
from trainer.metrics.console import Log

INTERVAL_S = 30
"""Minimum time between two lines (seconds)."""


class Progress:
    """Counts what rank 0 has done, which stands for all replicas, and logs it from time to time."""

    def __init__(self, log: Log, title: str, total: int, noun: str) -> None:
        self._log, self._title, self._total, self._noun = log, title, total, noun
        self._done = 0
        self._started = self._logged = time.monotonic()

    def advance(self, count: int) -> None:
        """Add finished work of all replicas."""
        self._done = min(self._done + count, self._total)
        now = time.monotonic()
        if now - self._logged < INTERVAL_S or self._done == self._total:
            return
        self._logged = now
        left = (now - self._started) / self._done * (self._total - self._done)
        self._log.line(
            f"{self._title}: {self._done:,} of {counted(self._total, self._noun)}, {duration(round(left))} left"
        )
