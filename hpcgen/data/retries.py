"""Retries of requests to a store of files that is busy, slow or down."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hpcgen.data.urls import redacted
from hpcgen.errors import HpcgenError
from hpcgen.text import counted

Result = TypeVar("Result")


class TransientError(Exception):
    """An error that a retry may resolve."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Timeouts, and how often and how long to retry."""

    attempts: int = 10
    """Maximum number of consecutive attempts without progress."""
    first_wait_s: float = 1.0
    """Upper bound of the first wait; it doubles with each further wait."""
    longest_wait_s: float = 120.0
    longest_retry_after_s: float = 900.0
    """Upper bound for a server's Retry-After."""
    connect_timeout_s: float = 20.0
    read_timeout_s: float = 60.0
    """A connection that delivers nothing for this long is closed."""
    slowest_bytes_per_s: float = 1024.0
    """A connection that is slower than this over `read_timeout_s` is closed too."""
    invalid_responses: int = 3
    """Maximum number of responses with status 200 that are not the file (a web page, an empty body, another size)."""

    def wait_s(self, failures: int, retry_after_s: float | None) -> float:
        """Seconds to wait after a number of consecutive failures.

        The wait is drawn at random from its full range ("full jitter"), so that clients that failed together do not
        retry together.
        """
        bound = min(self.longest_wait_s, self.first_wait_s * 2 ** (failures - 1))
        if retry_after_s is None:
            return random.uniform(0, bound)
        return min(retry_after_s, self.longest_retry_after_s) + random.uniform(0, self.first_wait_s)

    def retry(
        self, url: str, once: Callable[[], Result], progress: Callable[[], int] = lambda: 0, hint: str = ""
    ) -> Result:
        """Calls `once`, again after each TransientError, until it succeeds. Returns its result.

        `progress` measures the work done so far. Any increase resets the count of failures.

        Raises:
            HpcgenError: too many consecutive failures, or an error that a retry cannot resolve.
        """
        failures, furthest, started = 0, progress(), time.monotonic()
        while True:
            try:
                return once()
            except TransientError as problem:
                if progress() > furthest:
                    failures, furthest = 0, progress()
                failures += 1
                if failures >= self.attempts:
                    after = f"after {counted(failures, 'attempt')} in {time.monotonic() - started:.0f} s"
                    raise HpcgenError(f"{redacted(url)}: {problem} ({after})", hint) from problem
                time.sleep(self.wait_s(failures, problem.retry_after_s))


INTERACTIVE = RetryPolicy(
    attempts=4, longest_wait_s=10, longest_retry_after_s=60, connect_timeout_s=10, read_timeout_s=30
)
"""Retry policy for requests while the user waits."""
