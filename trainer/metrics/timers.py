"""Measures the parts of a step without ever waiting for the GPU.

Megatron-Core calls `config.timers(name, log_level=...)`, and `.start(barrier=...)` and `.stop()` on the result, around
the parts of a step. Its own timers synchronize the GPU at each of these calls. These timers put CUDA events between the
kernels and read them once they have completed. On a CPU, where every call blocks, they read the clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config

from trainer.optimizer.build import optimizers_of

T = TypeVar("T")

BATCH = "batch"
"""Name for loading a microbatch, which is not one of Core's. It is part of forward-compute."""

# Core's names in megatron-core 0.16 to 0.19, without sends and receives between pipeline stages. Those mostly measure
# the bubble, and an interleaved schedule does not time its waits.
KINDS = {
    "forward-compute": "compute_s",
    "backward-compute": "compute_s",
    "all-grads-sync": "communication_s",
    "conditional-embedder-grads-all-reduce": "communication_s",
    "non-tensor-parallel-grads-all-reduce": "communication_s",
    "embedding-grads-all-reduce": "communication_s",
    "params-all-gather": "communication_s",
    "optimizer-copy-to-main-grad": "update_s",
    "optimizer-unscale-and-check-inf": "update_s",
    "optimizer-inner-step": "update_s",
    "optimizer-copy-main-to-model-params": "update_s",
}


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of this rank."""

    compute_s: float = 0.0
    """Forward and backward passes, without loading microbatches."""
    communication_s: float = 0.0
    """Reducing gradients and gathering parameters, unless overlapped with computation."""
    update_s: float = 0.0
    """The optimizer's computation."""
    batch_s: float = 0.0
    """Time in which the device was idle because it waited for a microbatch."""
    data_wait_s: float = 0.0
    """Time in which the program waited for microbatches. At least batch_s, since a GPU may have had work meanwhile."""

    def __sub__(self, other: Times) -> Times:
        return Times(
            **{f.name: getattr(self, f.name) - getattr(other, f.name) for f in dataclasses.fields(self)}
        )

    @property
    def accounted_s(self) -> float:
        """Step time without idle time."""
        return self.compute_s + self.communication_s + self.update_s + self.batch_s


class Timers:
    """Implementation of Megatron-Core's `config.timers`: returns a stopwatch for each part of a step."""

    def __init__(self, device: str) -> None:
        self._marks: _Clock | _Events = _Events() if device == "cuda" else _Clock()
        self._watches = {name: Stopwatch(self, name) for name in (*KINDS, BATCH)}
        self._seconds = dict.fromkeys(self._watches, 0.0)
        self._data_wait_s = 0.0
        self._pending: deque[tuple[str, Any, Any]] = deque()
        self.is_paused = False

    def __call__(self, name: str, log_level: int | None = None) -> Stopwatch | _NoStopwatch:
        """The stopwatch of a part of a step. It does nothing for parts that are not recorded."""
        return self._watches.get(name, _NO_STOPWATCH)

    def attach(self, model: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
        """Make Megatron-Core time the steps of this model and optimizer."""
        for chunk in model:
            get_model_config(chunk).timers = self
        for part in (optimizer, *optimizers_of(optimizer)):
            part.config.timers = self

    def waited_for(self, batches: Iterator[T]) -> Iterator[T]:
        """`batches`, with a measurement of the time spent waiting for each."""
        watch = self._watches[BATCH]
        while True:
            began = time.perf_counter()
            watch.start()
            batch = next(batches, None)
            watch.stop()
            self._data_wait_s += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time within this context, which is not part of a training step."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def totals(self) -> Times:
        """Times so far, of work that the device has finished. Does not wait; later calls include the rest.

        Once the loss of a step is read, only the step's update can be unfinished.
        """
        while self._pending:
            name, start, stop = self._pending[0]
            seconds = self._marks.seconds(start, stop)
            if seconds is None:  # a stream works in order, so all later work is unfinished too
                break
            self._seconds[name] += seconds
            self._pending.popleft()
        kinds = dict.fromkeys(KINDS.values(), 0.0)
        for name, kind in KINDS.items():
            kinds[kind] += self._seconds[name]
        batch_s = self._seconds[BATCH]
        kinds["compute_s"] -= batch_s
        return Times(**kinds, batch_s=batch_s, data_wait_s=self._data_wait_s)

    def mark(self) -> Any:
        """Mark the current point in the device's work."""
        return self._marks.mark()

    def add(self, name: str, start: Any, stop: Any) -> None:
        """Add the work between two marks to a part."""
        self._pending.append((name, start, stop))


class Stopwatch:
    """Stand-in for one of Core's timers. It never waits, even if Core requests a barrier."""

    __slots__ = ("_name", "_start", "_timers")

    def __init__(self, timers: Timers, name: str) -> None:
        self._timers, self._name = timers, name
        self._start: Any = None

    def start(self, barrier: bool = False) -> None:
        """Start, unless the timers are paused."""
        if not self._timers.is_paused:
            self._start = self._timers.mark()

    def stop(self, barrier: bool = False) -> None:
        """Stop, and add the time since `start`."""
        if self._start is not None:
            self._timers.add(self._name, self._start, self._timers.mark())
            self._start = None


class _NoStopwatch:
    """Stopwatch for parts of a step that are not recorded."""

    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self, barrier: bool = False) -> None:
        pass


_NO_STOPWATCH = _NoStopwatch()


class _Clock:
    """Marks for a device that finishes its work before each call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, stop: float) -> float | None:
        return stop - start


class _Events:
    """Marks in the work of the current CUDA stream. Events are reused once they are read."""

    POOL = 256

    def __init__(self) -> None:
        self._free = [torch.cuda.Event(enable_timing=True) for _ in range(self.POOL)]

    def mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float | None:
        """Time between two marks; None if the GPU has not reached `stop` yet. Does not wait."""
        if not stop.query():
            return None
        milliseconds = start.elapsed_time(stop)
        self._free += (start, stop)
        return milliseconds / 1e3
