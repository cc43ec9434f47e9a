"""Asking a run to stop: a file that rank 0 sees, or a signal to any rank. And leaving without the others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from trainer.errors import Exit
from trainer.peers import Peers, ranges
from trainer.rendezvous import Ranks

ROLL_CALL_S = 3.5
"""How long after SIGTERM the other ranks may take to have got theirs."""


class StopRequest:
    """Remembers that this rank was asked to stop.

    Signals only set a flag, however often they come. The ranks agree on it in the all-reduce of each step, save, and
    leave together.
    """

    def __init__(self, stop_file: Path | None) -> None:
        """`stop_file` is given to rank 0 alone."""
        self._stop_file = stop_file
        self._signal: signal.Signals | None = None
        self._agreed = threading.Event()
        signal.signal(signal.SIGUSR2, self._remember)

    def reason(self) -> str | None:
        """Why this rank should stop; None when it should not."""
        if self._signal is not None:
            return self._signal.name
        if self._stop_file is not None and self._stop_file.exists():
            return str(self._stop_file)
        return None

    def answer_sigterm(self, ranks: Ranks, peers: Peers, is_worth_saving: Callable[[], bool]) -> None:
        """From here on SIGTERM is a request to stop as well, if all ranks get it; without this it ends the process.

        Slurm sends SIGTERM to every rank when it ends a job, and to those that are left when one is gone. In the
        first case they reach the end of their step, however long it is; in the second they would wait in a collective
        for the dead until they are killed. So a rank that gets it calls the roll through the store: unless all
        answer, or when `is_worth_saving` says that there is nothing to save, it leaves at once with status 143.
        """
        heard, hears = socket.socketpair()
        hears.setblocking(False)
        # Python's own handler waits until the main thread is back from a collective; this is written without it.
        signal.set_wakeup_fd(hears.fileno(), warn_on_full_buffer=False)
        self._sockets = (heard, hears)
        arguments = (heard, ranks, peers, is_worth_saving)
        threading.Thread(target=self._call_roll, args=arguments, daemon=True).start()
        signal.signal(signal.SIGTERM, self._remember)

    def agreed(self) -> None:
        """All ranks are at the end of a step and save now: a SIGTERM, earlier or later, does not keep them from it."""
        self._agreed.set()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)

    def _call_roll(
        self, heard: socket.socket, ranks: Ranks, peers: Peers, is_worth_saving: Callable[[], bool]
    ) -> None:
        while heard.recv(1) != bytes([signal.SIGTERM]):
            pass
        missing = peers.missing("terminated", ROLL_CALL_S)
        if self._agreed.is_set() or (missing == [] and is_worth_saving()):
            return
        if missing is None:
            line = "rank 0 does not answer: this rank leaves without saving"
        elif ranks.rank != min(set(range(ranks.world_size)) - set(missing)):
            leave(Exit.TERMINATED)  # one of those that answered says it for all
        elif missing:
            line = f"rank {ranges(missing)} did not get it or is gone: the others leave without saving"
        else:
            line = "all ranks leave before the first step: there is nothing to save"
            time.sleep(1)  # the others still ask the store of rank 0 whether all are here
        leave(Exit.TERMINATED, f"{ranks.name}: SIGTERM; {line}")


def leave(status: int, line: str | None = None) -> NoReturn:
    """Ends this process at once, from any thread, with a line on stderr; clearing up would wait for other ranks."""
    if line is not None:
        print(f"trainer: {line}", file=sys.stderr)
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
