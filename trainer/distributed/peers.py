"""What a rank learns of the others without a collective: by the store where the ranks met, and never for long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from trainer.distributed.rendezvous import Ranks

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

ANSWER_S = 2.0
"""How long a question to the store may take. It may be answered later, and then the next one is asked."""

ASK_AGAIN_S = 0.2


class Peers:
    """The other ranks. Any of them, rank 0 with the store too, may be gone or stopped: each answer comes in time.

    What the ranks say on a topic is one string at the store, to which each appends its line: whoever asks has all of
    it by one question, however many ranks there are.
    """

    def __init__(self, ranks: Ranks, store: Store) -> None:
        """`store` is a connection of this object's own: on one that another thread waits at, a question waits too."""
        self._ranks, self._store = ranks, store
        self._turn = threading.Lock()
        self._say("host", socket.gethostname())

    def hosts(self) -> dict[int, str]:
        """Where the ranks run, as far as it is known."""
        return self._heard("host") or {}

    def raise_alarm(self) -> None:
        """Tells every rank that looks that this one hangs."""
        self._say("alarm", "")

    def is_alarmed(self) -> bool:
        """Whether a rank has raised the alarm."""
        return bool(self._heard("alarm"))

    def call_roll(self, topic: str, answer: str, wait_s: float) -> dict[int, str]:
        """Answers on a topic, and waits until all have, or for `wait_s`. Returns the answers by rank, as last heard.

        There are none when the store of rank 0 was silent all the time.
        """
        end = time.monotonic() + wait_s
        self._say(topic, answer)
        answers: dict[int, str] = {}
        while True:
            answers = self._heard(topic) or answers
            if len(answers) == self._ranks.world_size or time.monotonic() > end:
                return answers
            time.sleep(ASK_AGAIN_S)

    def _say(self, topic: str, text: str) -> None:
        self._ask(lambda: self._store.append(topic, f"{self._ranks.rank} {text}\n"))

    def _heard(self, topic: str) -> dict[int, str] | None:
        """What the ranks have said on a topic; None when the store does not answer."""
        said = self._ask(lambda: self._store.get(topic).decode() if self._store.check([topic]) else "")
        if said is None:
            return None
        lines = (line.partition(" ") for line in said.splitlines())
        return {int(rank): text for rank, _, text in lines}

    def _ask(self, question: Callable[[], T]) -> T | None:
        """The store's answer; None when it does not come in time, or one before it is still waited for."""

        def ask() -> T:
            try:
                return question()
            finally:
                self._turn.release()

        if not self._turn.acquire(timeout=ANSWER_S):
            return None
        try:
            return within(ANSWER_S, ask)
        except TimeoutError:
            return None


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
