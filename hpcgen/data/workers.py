"""Worker processes that take one item of a list after the other.

In place of concurrent.futures: there, a worker that is killed takes all others with it, and nobody learns what it
was at. Here each has a pipe of its own, so that it can be killed at any time without harm to the others.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, TypeAlias, cast

from hpcgen.errors import HpcgenError

_PATIENCE_S = 5.0
"""A worker that was asked to end, and removes its private files, is killed after this time."""
_MOST_DEATHS = 5
"""So many workers killed in a row, with nothing done in between, are no accident."""


@dataclass(frozen=True)
class Told:
    """What an item's work said on the way."""

    index: int
    message: Any


@dataclass(frozen=True)
class Made:
    """An item is done."""

    index: int
    result: Any


@dataclass(frozen=True)
class Failed:
    """An item is not done."""

    index: int
    reason: str


Event: TypeAlias = Told | Made | Failed
Work: TypeAlias = Callable[[Any, Callable[[Any], None]], Any]
"""Called with an item and a function that tells; importable, since it runs in another process."""


def cores() -> int:
    """Cores that this process may use: of a Slurm job its own, even where Slurm does not bind tasks to cores."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return min(available, int(given)) if given.isdigit() and int(given) else available


def run_all(
    work: Work, items: Sequence[Any], num_workers: int, interval_s: float = 0.5
) -> Generator[Event | None, None, None]:
    """Works through `items`, `num_workers` at a time, and yields what happens; None when nothing did for a while.

    An item whose worker is killed has failed, and the worker is not replaced as long as there are others: when
    memory is short, fewer of them go further. Closing the generator ends the workers; when this process is
    killed, they end themselves. Workers that end remove their private files, unless they are killed. When one
    worker after the other is killed, what is left has failed as well, untried.
    """
    left = deque(enumerate(items))
    deaths = 0
    started: list[_Worker] = []
    try:
        for _ in range(min(num_workers, len(items))):
            started.append(_Worker(work))
        busy = {worker.pipe: worker for worker in started}
        while busy:
            ready = wait(list(busy), interval_s)
            if not ready:
                yield None
            for pipe in cast("list[Connection]", ready):
                worker = busy[pipe]
                event = worker.receive()
                if event is not None:
                    yield event
                if isinstance(event, Told):
                    continue
                deaths = deaths + 1 if worker.is_dead else 0 if event else deaths
                if deaths == _MOST_DEATHS:
                    yield from (
                        Failed(index, f"not tried, since {deaths} workers in a row died") for index, _ in left
                    )
                    left.clear()
                if worker.is_dead or not worker.give(left):
                    del busy[pipe]
                    pipe.close()
                if left and not busy:
                    started.append(_Worker(work))
                    busy[started[-1].pipe] = started[-1]
        _join(started)
    finally:
        _end(started)


class _Worker:
    """One process, seen from its parent. It says None when it is ready for its first item."""

    def __init__(self, work: Work) -> None:
        context = multiprocessing.get_context(
            "spawn"
        )  # a fork would copy the locks of this process's threads
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, work), daemon=True)
        with _without_ctrl_c():
            self.process.start()
        theirs.close()  # so that our end tells when the process is gone
        self.is_dead = False
        self._at: int | None = None

    def give(self, left: deque[tuple[int, Any]]) -> bool:
        """Gives it the next item; False when there is none."""
        if not left:
            return False
        self._at, item = left.popleft()
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead: `receive` tells
            self.pipe.send((self._at, item))
        return True

    def receive(self) -> Event | None:
        """The next thing it says. When it is dead, the item it was at has failed."""
        try:
            event: Event | None = self.pipe.recv()
        except (EOFError, OSError):
            self.is_dead = True
            self.process.join(_PATIENCE_S)
            return None if self._at is None else Failed(self._at, _cause_of_death(self.process.exitcode))
        return event


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Processes started now never see it: it reaches this process too, which ends them."""
    resource_tracker.ensure_running()  # by itself it would start with the first process, and undo this
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _cause_of_death(exit_code: int | None) -> str:
    if exit_code == -signal.SIGKILL:
        return (
            "its worker process was killed (SIGKILL), as the kernel does when memory runs out; "
            "run it again with fewer --workers or more memory"
        )
    name = (
        f"signal {signal.Signals(-exit_code).name}" if exit_code and exit_code < 0 else f"status {exit_code}"
    )
    return f"its worker process ended with {name}; run it again"


def _end(workers: Sequence[_Worker]) -> None:
    """Ends at once those that have not ended."""
    for worker in workers:
        worker.process.terminate()
    _join(workers)
    for worker in workers:
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()


def _join(workers: Sequence[_Worker]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))


def _serve(pipe: Connection, work: Work) -> None:
    """What a worker process does."""
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_follow_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has no more for us
        pipe.send(None)
        while True:
            index, item = pipe.recv()
            pipe.send(_outcome(index, item, work, pipe))


def _outcome(index: int, item: Any, work: Work, pipe: Connection) -> Event:
    try:
        return Made(index, work(item, lambda message: pipe.send(Told(index, message))))
    except HpcgenError as error:
        return Failed(index, str(error))
    except MemoryError:
        return Failed(index, "out of memory; run it again with fewer --workers or more memory")
    except OSError as error:
        names = [name for name in (error.filename, error.filename2) if name is not None]
        return Failed(index, ": ".join((error.strerror or str(error), *map(str, names))))
    except Exception:  # our own mistake: with its traceback, and without harm to the other items
        return Failed(index, traceback.format_exc())


def _leave(signal_number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signal_number)  # through the context managers that remove private files


def _follow_parent() -> None:
    """A worker whose parent was killed ends as well."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
