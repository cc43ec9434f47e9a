"""Communication between ranks without collectives, through the store and with timeouts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from trainer.distributed.rendezvous import Ranks

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

ANSWER_S = 2.0
"""Timeout of a request to the store (seconds). A late answer only delays the next request."""

POLL_INTERVAL_S = 0.2
"""Interval between requests while waiting for answers (seconds)."""


class Peers:
    """Messages between ranks through the store. Any rank may be gone or stopped, so every request has a timeout.

    The messages on a topic are one string in the store, to which each rank appends a line. So one request returns the
    messages of all ranks.
    """

    def __init__(self, ranks: Ranks, store: Store) -> None:
        """`store` must be a separate connection, since a request would wait for other threads that use the same one."""
        self._ranks, self._store = ranks, store
        self._turn = threading.Lock()
        self._send("host", socket.gethostname())

    def hosts(self) -> dict[int, str]:
        """Known hosts of the ranks."""
        return self._receive("host") or {}

    def raise_alarm(self) -> None:
        """Tell the other ranks that this one hangs."""
        self._send("alarm", "")

    def is_alarmed(self) -> bool:
        """True if any rank has raised the alarm."""
        return bool(self._receive("alarm"))

    def call_roll(self, topic: str, answer: str, wait_s: float) -> dict[int, str]:
        """Answer on a topic, and wait until all ranks have answered, for at most `wait_s`. Returns the answers by rank.

        The result is empty if the store of rank 0 never responded.
        """
        end = time.monotonic() + wait_s
        self._send(topic, answer)
        answers: dict[int, str] = {}
        while True:
            answers = self._receive(topic) or answers
            if len(answers) == self._ranks.world_size or time.monotonic() > end:
                return answers
            time.sleep(POLL_INTERVAL_S)

    def _send(self, topic: str, text: str) -> None:
        self._request(lambda: self._store.append(topic, f"{self._ranks.rank} {text}\n"))

    def _receive(self, topic: str) -> dict[int, str] | None:
        """Messages of the ranks on a topic; None if the store does not respond."""
        messages = self._request(
            lambda: self._store.get(topic).decode() if self._store.check([topic]) else ""
        )
        if messages is None:
            return None
        lines = (line.partition(" ") for line in messages.split("\n") if line)
        return {int(rank): text for rank, _, text in lines}

    def _request(self, function: Callable[[], T]) -> T | None:
        """Result of a request to the store; None if it times out, or if an earlier request is still waiting."""

        def call() -> T:
            try:
                return function()
            finally:
                self._turn.release()

        if not self._turn.acquire(timeout=ANSWER_S):
            return None
        try:
            return call_with_timeout(ANSWER_S, call)
        except TimeoutError:
            return None


def call_with_timeout(seconds: float, function: Callable[[], T]) -> T:
    """Call `function` in a thread and return its result.

    Raises:
        TimeoutError: there is no result after `seconds`, or the function failed. Its thread may still run.
    """
    results: list[T] = []

    def call() -> None:
        try:
            results.append(function())
        except Exception:  # for example, the store's host is gone or a disk is full
            return

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise TimeoutError
    return results[0]
