"""Worker processes that share the items of a list and the cores. Each one processes one item at a time.

Replaces concurrent.futures, where a killed worker breaks the whole pool and its item is unknown. Here each worker has
its own pipe, so it can be killed at any time without affecting the others.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, TypeAlias, cast

from hpcgen.errors import HpcgenError

_STOP_GRACE_S = 5.0
"""Time for a terminated worker to remove its private files before it is killed."""
_MAX_CONSECUTIVE_DEATHS = 5
"""If this many workers in a row are killed without finishing an item, the remaining items are not tried."""
_FREE_SPACE = "free some space, and run the stage again (finished outputs are kept)"
_HINTS = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or use more and smaller outputs",
}
"""Advice for errors of storage."""


@dataclass(frozen=True)
class Update:
    """Progress message about an item that is being processed."""

    index: int
    message: Any


@dataclass(frozen=True)
class Finished:
    """An item is done."""

    index: int
    result: Any


@dataclass(frozen=True)
class Failed:
    """An item failed."""

    index: int
    reason: str


Event: TypeAlias = Update | Finished | Failed
Work: TypeAlias = Callable[[Any, Callable[[Any], None], Callable[[], int]], Any]
"""Called with an item, a function that sends updates, and a function that returns the number of cores that the item
may use now. Must be importable, because it runs in another process."""


def cores() -> int:
    """Number of cores that this process may use. In a Slurm job, these are the cores of its task, even without core
    binding."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return min(available, int(given)) if given.isdigit() and int(given) else available


def run_all(
    work: Work, items: Sequence[Any], num_workers: int, interval_s: float = 0.5
) -> Generator[Event | None, None, None]:
    """Processes `items`, `num_workers` at a time, and yields events, or None after `interval_s` without one.

    The workers share all cores of this process. A worker that finds no more items leaves its cores to the others.
    An item whose worker is killed has failed. The worker is not replaced while there are others, because fewer
    workers get further when memory is short. Closing the generator terminates the workers; if this process is
    killed, they exit by themselves. A worker removes its private files when it exits, unless it is killed. If several
    workers in a row are killed, the remaining items fail without being tried.
    """
    left = deque(enumerate(items))
    deaths = 0
    started: list[_Worker] = []
    try:
        for _ in range(min(num_workers, len(items))):
            started.append(_Worker(work))
        busy = {worker.pipe: worker for worker in started}
        num_cores = cores()
        _share_cores(busy.values(), num_cores)
        while busy:
            ready = wait(list(busy), interval_s)
            if not ready:
                yield None
            for pipe in cast("list[Connection]", ready):
                worker = busy[pipe]
                event = worker.receive()
                if event is not None:
                    yield event
                if isinstance(event, Update):
                    continue  # its item is not done
                deaths = deaths + 1 if worker.is_dead else 0 if event else deaths
                if deaths == _MAX_CONSECUTIVE_DEATHS:
                    yield from (
                        Failed(index, f"not tried, because {deaths} workers in a row died")
                        for index, _ in left
                    )
                    left.clear()
                if worker.is_dead or not worker.assign(left):
                    del busy[pipe]
                    pipe.close()
                    # The cores of a killed worker stay unused, because memory may be short.
                    num_cores -= worker.num_cores.value if worker.is_dead else 0
                    _share_cores(busy.values(), num_cores)
                if left and not busy:  # the last worker died; a new one has all memory to itself
                    started.append(_Worker(work))
                    busy[started[-1].pipe] = started[-1]
        _join(started)
    finally:
        _stop(started)


class _Worker:
    """The parent's handle for one worker process. The worker sends None when it is ready for its first item."""

    def __init__(self, work: Work) -> None:
        context = multiprocessing.get_context(
            "spawn"
        )  # a fork would copy the locks of this process's threads
        self.pipe, child_pipe = context.Pipe()
        self.num_cores = context.RawValue("i", 1)
        """Cores that the worker may use; shared memory, because the worker reads it while it processes an item."""
        arguments = (child_pipe, work, self.num_cores)
        self.process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)
        with _without_ctrl_c():
            self.process.start()
        child_pipe.close()  # so that the parent's end reports when the process is gone
        self.is_dead = False
        self._current: int | None = None

    def assign(self, left: deque[tuple[int, Any]]) -> bool:
        """Sends the next item to the worker. Returns False if there is none."""
        if not left:
            return False
        self._current, item = left.popleft()
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead, which `receive` detects
            self.pipe.send((self._current, item))
        return True

    def receive(self) -> Event | None:
        """Returns the next event. If the worker is dead, its current item has failed."""
        try:
            event: Event | None = self.pipe.recv()
        except (EOFError, OSError):
            self.is_dead = True
            self.process.join(_STOP_GRACE_S)
            return (
                None if self._current is None else Failed(self._current, _exit_reason(self.process.exitcode))
            )
        return event


def _share_cores(workers: Iterable[_Worker], num_cores: int) -> None:
    """Divides the cores among the workers as evenly as possible; each gets at least one."""
    sharers = list(workers)
    for number, worker in enumerate(sharers):
        worker.num_cores.value = max(1, (num_cores + number) // len(sharers))


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Blocks SIGINT for processes started here. Ctrl-C reaches this process as well, which terminates them."""
    resource_tracker.ensure_running()  # otherwise it would start with the first process and unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_reason(exit_code: int | None) -> str:
    if exit_code == -signal.SIGKILL:
        return (
            "its worker process was killed (SIGKILL), probably because memory ran out; "
            "run it again with fewer --workers or more memory"
        )
    name = (
        f"signal {signal.Signals(-exit_code).name}" if exit_code and exit_code < 0 else f"status {exit_code}"
    )
    return f"its worker process ended with {name}; run it again"


def _stop(workers: Sequence[_Worker]) -> None:
    """Terminates workers that are still running, and kills them after a grace period."""
    for worker in workers:
        worker.process.terminate()
    _join(workers)
    for worker in workers:
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()


def _join(workers: Sequence[_Worker]) -> None:
    deadline = time.monotonic() + _STOP_GRACE_S
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))


def _serve(pipe: Connection, work: Work, num_cores: Any) -> None:
    """Main loop of a worker process."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has no more items
        pipe.send(None)
        while True:
            index, item = pipe.recv()
            pipe.send(_outcome(index, item, work, pipe, num_cores))


def _outcome(index: int, item: Any, work: Work, pipe: Connection, num_cores: Any) -> Event:
    try:
        result = work(item, lambda message: pipe.send(Update(index, message)), lambda: int(num_cores.value))
        return Finished(index, result)
    except HpcgenError as error:
        return Failed(index, str(error))
    except MemoryError:
        return Failed(index, "out of memory; run it again with fewer --workers or more memory")
    except OSError as error:
        names = [name for name in (error.filename, error.filename2) if name is not None]
        reason = ": ".join((error.strerror or str(error), *map(str, names)))
        hint = _HINTS.get(error.errno or 0)
        return Failed(index, f"{reason}; {hint}" if hint else reason)
    except Exception:  # a bug in hpcgen: report the traceback and go on with the other items
        return Failed(index, traceback.format_exc())


def _exit_on_signal(signal_number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signal_number)  # unwinds the context managers that remove private files


def _exit_with_parent() -> None:
    """Ends this worker when its parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
