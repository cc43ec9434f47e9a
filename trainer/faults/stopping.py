"""Asking a run to stop: a file that rank 0 sees, or a signal to any rank. And leaving without the others."""

from __future__ import annotations

import contextlib
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

from trainer.contract.config import ConfigError
from trainer.contract.errors import Exit, TrainerError
from trainer.contract.run_directory import RunDirectory, open_nofollow, publish
from trainer.distributed.peers import Peers, ranges, within
from trainer.distributed.rendezvous import Ranks, find_ranks

ROLL_CALL_S = 3.5
"""How long after SIGTERM the other ranks may take to have got theirs."""

YES, NO = "yes", "no"
"""A rank's answer to the roll: whether it has done a step, which is worth saving."""

LOOK_EVERY_S = 0.2
"""Between two looks for the stop file."""

LINE_S = 2.0
"""A stderr that nobody reads does not keep a process from ending."""


class StopRequest:
    """Remembers that this rank was asked to stop.

    Signals only set a flag, however often they come. The ranks agree on it in the all-reduce of each step, save, and
    leave together.
    """

    def __init__(self, stop_file: Path | None) -> None:
        """`stop_file` is given to rank 0 alone."""
        self._signal: signal.Signals | None = None
        self._seen: Path | None = None
        self._agreed = threading.Event()
        signal.signal(signal.SIGUSR2, self._remember)
        signal.signal(signal.SIGINT, self._interrupt)
        if stop_file is not None:
            # The loop does not look itself: where the storage hangs or fails, training goes on.
            threading.Thread(target=self._look_for, args=(stop_file,), daemon=True).start()

    def reason(self) -> str | None:
        """Why this rank should stop; None when it should not."""
        if self._signal is not None:
            return self._signal.name
        return None if self._seen is None else str(self._seen)

    def answer_sigterm(
        self,
        ranks: Ranks,
        peers: Peers,
        is_worth_saving: Callable[[], bool],
        hurry: Callable[[], None],
    ) -> None:
        """From here on SIGTERM is a request to stop as well, if all ranks get it; without this it ends the process.

        Slurm sends SIGTERM to every rank when it ends a job, and to those that are left when one is gone. In the
        first case they reach the end of their step, however long it is; in the second they would wait in a collective
        for the dead until they are killed. So a rank that gets it calls the roll through the store, and answers
        whether `is_worth_saving`: unless all ranks answer, and all of them yes, it leaves at once with status 143.
        Otherwise it calls `hurry`, for one that dies after its answer.
        """
        heard, hears = socket.socketpair()
        hears.setblocking(False)
        # Python's own handler waits until the main thread is back from a collective; this is written without it.
        signal.set_wakeup_fd(hears.fileno(), warn_on_full_buffer=False)
        self._sockets = (heard, hears)
        arguments = (heard, ranks, peers, is_worth_saving, hurry)
        threading.Thread(target=self._call_roll, args=arguments, name="roll call", daemon=True).start()
        signal.signal(signal.SIGTERM, self._remember)

    def agreed(self) -> None:
        """All ranks save now, or end by themselves: a SIGTERM, earlier or later, does not keep them from it."""
        self._agreed.set()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._signal is signal.SIGINT:
            leave(Exit.TERMINATED, "interrupted again: ends without saving")
        self._remember(number, frame)
        _say("interrupted: saves at the end of this step; Ctrl-C again ends at once")

    def _look_for(self, stop_file: Path) -> None:
        while self._seen is None:
            with contextlib.suppress(OSError):  # what cannot be read asks for nothing
                self._seen = stop_file if stop_file.exists() else None
            time.sleep(LOOK_EVERY_S)

    def _call_roll(
        self,
        heard: socket.socket,
        ranks: Ranks,
        peers: Peers,
        is_worth_saving: Callable[[], bool],
        hurry: Callable[[], None],
    ) -> None:
        while heard.recv(1) != bytes([signal.SIGTERM]):
            pass
        answers = peers.call_roll("terminated", YES if is_worth_saving() else NO, ROLL_CALL_S)
        missing = sorted(set(range(ranks.world_size)) - set(answers))
        if not missing and NO in answers.values():
            time.sleep(1)  # the others still ask the store of rank 0, or agree at the end of the first step
        if self._agreed.is_set():
            return
        if not missing and NO not in answers.values():
            hurry()
            return
        if not answers:
            line = "rank 0 does not answer: this rank leaves without saving"
        elif ranks.rank != min(answers):
            leave(Exit.TERMINATED)  # one of those that answered says it for all
        elif missing:
            line = f"rank {ranges(missing)} did not get it or is gone: the others leave without saving"
        else:
            line = "all ranks leave before the first step: there is nothing to save"
        leave(Exit.TERMINATED, f"{ranks.name}: SIGTERM; {line}")


def is_another_s(error: Exception) -> bool:
    """Whether the error is rank 0's to report."""
    return getattr(error, "is_everywhere", False) and find_ranks(os.environ).rank != 0


def announce(error: TrainerError | ConfigError, run: RunDirectory | None) -> None:
    """Says why the run ends, once, and leaves it in the run directory when starting again would give the same.

    Whatever takes time comes after this: srun ends a rank as soon as another one has left.
    """
    if getattr(error, "is_announced", False) or is_another_s(error):
        return
    error.is_announced = True
    _say(str(error))
    if run is not None and getattr(error, "is_final", True):
        with contextlib.suppress(OSError):  # the log has it, and the run directory may be what is wrong
            try:
                publish(run.failed, f"{error}\n")
            except OSError:  # a full disk takes an empty file, which says as much to the batch script
                os.close(open_nofollow(str(run.failed), os.O_WRONLY | os.O_CREAT))


def leave(status: int, line: str | None = None) -> NoReturn:
    """Ends this process at once, from any thread, with a line on stderr; clearing up would wait for other ranks."""
    if line is not None:
        _say(line)
    for child in multiprocessing.active_children():
        child.kill()
    if threading.current_thread() is threading.main_thread():  # which may hold their locks
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _say(line: str) -> None:
    """A line on stderr, past Python's buffers and their locks."""
    with contextlib.suppress(TimeoutError):
        within(LINE_S, lambda: os.write(2, f"trainer: {line}\n".encode()))
