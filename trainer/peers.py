"""What a rank learns of the others without a collective: by the store where the ranks met, and never for long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from trainer.rendezvous import Ranks

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

ANSWER_S = 2.0
"""A store that does not answer for so long is not asked again."""

ASK_AGAIN_S = 0.2


class Peers:
    """The other ranks. Any of them, rank 0 with the store too, may be gone or stopped: each answer comes in time."""

    def __init__(self, ranks: Ranks, store: Store) -> None:
        """`store` is a connection of this object's own: on one that another thread waits at, a question waits too."""
        self._ranks, self._store = ranks, store
        self._is_silent = False
        self._say(f"host/{ranks.rank}", socket.gethostname())

    def host(self, rank: int) -> str | None:
        """Where a rank runs; None when it is not known."""
        key = f"host/{rank}"
        return self._ask(lambda: self._store.get(key).decode() if self._store.check([key]) else None, None)

    def raise_alarm(self) -> None:
        """Tells every rank that looks that this one hangs."""
        self._say("alarm", "")

    def is_alarmed(self) -> bool:
        """Whether a rank has raised the alarm."""
        return self._ask(lambda: self._store.check(["alarm"]), False)

    def missing(self, roll: str, wait_s: float) -> list[int] | None:
        """Answers a call of the roll, and waits for the others: those that did not answer it within `wait_s`.

        None when the store of rank 0 does not answer.
        """
        end = time.monotonic() + wait_s
        keys = [f"{roll}/{rank}" for rank in range(self._ranks.world_size)]
        self._say(keys[self._ranks.rank], "")
        while not self._ask(lambda: self._store.check(keys), False):
            if self._is_silent:
                return None
            if time.monotonic() > end:
                return self._ask(
                    lambda: [r for r, key in enumerate(keys) if not self._store.check([key])], None
                )
            time.sleep(ASK_AGAIN_S)
        return []

    def _say(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value), None)

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        if self._is_silent:
            return otherwise
        try:
            return within(ANSWER_S, question)
        except TimeoutError:
            self._is_silent = True
            return otherwise


def within(seconds: float, function: Callable[[], T]) -> T:
    """The function's result.

    Raises:
        TimeoutError: it has none after `seconds`, or failed; its thread may go on.
    """
    results: list[T] = []

    def call() -> None:
        try:
            results.append(function())
        except Exception:  # a store whose host is gone, a file system that is full: no result
            return

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise TimeoutError
    return results[0]


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in few words: `0-2,5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
