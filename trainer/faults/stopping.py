"""Stop requests, by a file that rank 0 sees or a signal to any rank, and immediate exits of a single rank."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import NoReturn

from trainer.contract.errors import Exit, Scope, TrainerError
from trainer.contract.files.run_directory import RunDirectory, open_nofollow, publish
from trainer.contract.wording import rank_list
from trainer.distributed.peers import Peers, call_with_timeout
from trainer.distributed.rendezvous import Ranks, find_ranks

ROLL_CALL_S = 3.5
"""Time after SIGTERM within which all other ranks must receive it too (seconds)."""

YES, NO = "yes", "no"
"""Answers of a rank to the roll call: whether it has completed a step and so has something to save."""

POLL_INTERVAL_S = 0.2
"""Interval between two checks for the stop file (seconds)."""

PRINT_TIMEOUT_S = 2.0
"""Timeout of a write to stderr, so that a blocked pipe does not keep a process from ending (seconds)."""

_announced: weakref.WeakSet[TrainerError] = weakref.WeakSet()
"""Errors that are already in the log, since an error passes several handlers on its way out."""


class StopRequest:
    """Request to this rank to stop, by a signal or by the stop file.

    Signals only set a flag. The ranks combine their flags in the all-reduce of each step, then save and leave together.
    """

    def __init__(self, stop_file: Path | None) -> None:
        """`stop_file` is None on all ranks except 0."""
        self._signal: signal.Signals | None = None
        self._seen: Path | None = None
        self._agreed = threading.Event()
        signal.signal(signal.SIGUSR2, self._remember)
        signal.signal(signal.SIGINT, self._interrupt)
        if stop_file is not None:
            # A thread polls the file, so that hanging storage does not block training.
            threading.Thread(target=self._poll, args=(stop_file,), daemon=True).start()

    def reason(self) -> str | None:
        """Reason why this rank should stop; None if it should not."""
        if self._signal is not None:
            return self._signal.name
        return None if self._seen is None else str(self._seen)

    def answer_sigterm(
        self,
        ranks: Ranks,
        peers: Peers,
        is_worth_saving: Callable[[], bool],
        shorten_timeout: Callable[[], None],
    ) -> None:
        """Treat SIGTERM as a stop request from now on, if all ranks receive it. Before this call, it ends the process.

        Slurm sends SIGTERM to every rank when it ends a job, but also to the remaining ranks when one is gone. In the
        first case the ranks can finish their step. In the second they would wait for the dead rank in a collective
        until they are killed. So a rank that receives SIGTERM starts a roll call through the store, and answers whether
        `is_worth_saving`. Unless all ranks answer yes, this rank leaves at once with status 143. If they do, it calls
        `shorten_timeout`, in case a rank dies after its answer.
        """
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        # Python runs signal handlers only after the main thread returns from a collective. The wakeup descriptor is
        # written immediately.
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        self._sockets = (receiver, sender)
        arguments = (receiver, ranks, peers, is_worth_saving, shorten_timeout)
        threading.Thread(target=self._call_roll, args=arguments, name="roll call", daemon=True).start()
        signal.signal(signal.SIGTERM, self._remember)

    def agreed(self) -> None:
        """Note that all ranks have agreed to save or to end. From now on, earlier and later SIGTERMs have no effect."""
        self._agreed.set()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._signal is signal.SIGINT:
            leave(Exit.TERMINATED, "interrupted again; leaving without saving")
        self._remember(number, frame)
        _print("interrupted; saving at the end of this step. Press Ctrl-C again to leave at once")

    def _poll(self, stop_file: Path) -> None:
        while self._seen is None:
            with contextlib.suppress(OSError):  # an unreadable file is not a request
                self._seen = stop_file if stop_file.exists() else None
            time.sleep(POLL_INTERVAL_S)

    def _call_roll(
        self,
        receiver: socket.socket,
        ranks: Ranks,
        peers: Peers,
        is_worth_saving: Callable[[], bool],
        shorten_timeout: Callable[[], None],
    ) -> None:
        while receiver.recv(1) != bytes([signal.SIGTERM]):
            pass
        answers = peers.call_roll("terminated", YES if is_worth_saving() else NO, ROLL_CALL_S)
        missing = sorted(set(range(ranks.world_size)) - set(answers))
        if not missing and NO in answers.values():
            time.sleep(1)  # others may still need the store of rank 0, or agree at the end of the first step
        if self._agreed.is_set():
            return
        if not missing and NO not in answers.values():
            shorten_timeout()
            return
        if not answers:
            line = "rank 0 does not answer, so this rank leaves without saving"
        elif ranks.rank != min(answers):
            leave(Exit.TERMINATED)  # the lowest rank that answered prints the line
        elif missing:
            line = f"{rank_list(missing)} did not receive it or died, so the others leave without saving"
        else:
            line = "all ranks leave before the first step, so there is nothing to save"
        leave(Exit.TERMINATED, f"{ranks.name}: SIGTERM; {line}")


def announce(error: TrainerError, run: RunDirectory | None) -> None:
    """Log once why the run ends. Also write it to FAILED in the run directory, unless another attempt may succeed.

    Call this before anything slow, since srun kills the other ranks as soon as one has left.
    """
    if error in _announced or _reported_by_rank_0(error):
        return
    _announced.add(error)
    _print(str(error))
    if run is not None and not error.retry:
        # The reason is in the log, and the run directory may be the problem.
        with contextlib.suppress(OSError):
            try:
                publish(run.failed, f"{error}\n")
            except OSError:  # an empty file fits on a full disk, and is enough for the batch script
                os.close(open_nofollow(str(run.failed), os.O_WRONLY | os.O_CREAT))


def _reported_by_rank_0(error: TrainerError) -> bool:
    return error.scope is Scope.ALL_RANKS and find_ranks(os.environ).rank != 0


def leave(status: int, line: str | None = None) -> NoReturn:
    """End this process at once, from any thread, with a line on stderr. A normal exit would wait for other ranks."""
    if line is not None:
        _print(line)
    for child in multiprocessing.active_children():
        child.kill()
    # In other threads, flushing could block on its locks.
    if threading.current_thread() is threading.main_thread():
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def announce_traceback() -> None:
    """Log the exception that is being handled, after a line with the rank and its host."""
    _print(f"{find_ranks(os.environ).name} ended with an unexpected error:")
    traceback.print_exc()


def _print(line: str) -> None:
    """Write a line to stderr directly, without Python's buffers and their locks.

    In a Slurm step it begins with the time, which tells the order of lines in the logs of several ranks.
    """
    time_now = f"{datetime.now().astimezone().isoformat(timespec='milliseconds')} "
    text = f"{time_now if 'SLURM_STEP_ID' in os.environ else ''}trainer: {line}\n"
    with contextlib.suppress(TimeoutError):
        call_with_timeout(PRINT_TIMEOUT_S, lambda: os.write(2, text.encode()))
