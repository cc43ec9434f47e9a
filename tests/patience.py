"""Waiting for what must happen. How long it takes depends on what else the machine does, so no test judges by it."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 600
"""Time after which a test calls a process or a job hanging. It is not what the test is about."""


def wait_until(
    condition: Callable[[], object],
    explain: Callable[[], str] = lambda: "",
    *,
    timeout_s: float = PATIENCE_S,
    interval_s: float = 0.05,
) -> None:
    """Returns once the condition holds.

    Raises:
        TimeoutError: it did not hold in time. The message is that of `explain`.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout_s:g} s\n{explain()}")
        time.sleep(interval_s)
