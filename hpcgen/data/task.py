"""One task of a stage's array: its units that are not done yet, on every core it has."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.manifest import Manifest
from hpcgen.data.record import Counts, Record
from hpcgen.data.unit import DataStage, Unit, configuration, done_record, units, units_of_task
from hpcgen.errors import HpcgenError

_WORK = {
    "download": ("hpcgen.data.download", "download"),
    "extract": ("hpcgen.data.extract", "extract"),
    "concat": ("hpcgen.data.concat", "concat"),
    "tokenize": ("hpcgen.data.tokenize", "tokenize_unit"),
    "prepare": ("hpcgen.data.tokenize", "tokenize_unit"),
}
"""Module and function of each stage: (unit, job, context) -> the record, published. Imported in the workers alone."""
_REPORT_INTERVAL_S = 0.5


@dataclass(frozen=True)
class Step:
    """What a unit did since it last told: bytes read from its inputs (on disk), documents and tokens written."""

    bytes: int = 0
    documents: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a unit's work is given besides the unit and the job."""

    configuration: str
    """Goes into the record."""
    threads: int = 1
    """Cores that this unit may keep busy."""
    advance: Callable[[Step], None] = lambda step: None
    """To be called now and then, from the thread that runs the unit."""


@dataclass
class Progress:
    """How far a task is. Bytes, documents and tokens of units that were done before are counted as well."""

    stage: str
    task_id: int
    num_tasks: int
    units: int = 0
    units_done: int = 0
    bytes: int = 0
    bytes_done: int = 0
    """Of the inputs, on disk; sizes that the manifest does not know count when they are read."""
    bytes_new: int = 0
    """The part of bytes_done that this run read."""
    documents: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.time)
    failed: int = 0


@dataclass(frozen=True)
class TaskReport:
    """What a task did."""

    stage: str
    task_id: int
    num_tasks: int
    done_before: int
    """Units that were done already."""
    records: tuple[Record, ...]
    """Of all its units, those done before included."""
    errors: tuple[str, ...]
    """One message for each unit that failed; nothing of these is published."""
    seconds: float

    @property
    def counts(self) -> Counts:
        """Of all its units."""
        return sum((record.counts for record in self.records), Counts())


def run_task(
    stage: DataStage,
    job: CorpusJob,
    manifest: Manifest,
    *,
    task_id: int = 0,
    num_tasks: int = 1,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> TaskReport:
    """Makes the units of one task that are not done, `workers` at a time (None: as many as it has cores).

    A unit that fails does not keep the others from being made. `on_progress` is called about twice a second.

    Raises:
        HpcgenError: what concerns all units: no manifest, a wrong tokenizer, a task_id that is out of range.
    """
    if not 0 <= task_id < num_tasks:
        raise HpcgenError(f"task {task_id} is not one of {num_tasks}", f"use 0 to {num_tasks - 1}")
    started = time.monotonic()
    of_configuration = configuration(stage, job)
    mine = units_of_task(units(stage, job, manifest), task_id, num_tasks)
    before = {unit.name: done_record(unit, job, of_configuration) for unit in mine}
    pending = [unit for unit in mine if before[unit.name] is None]
    records = [record for record in before.values() if record is not None]
    progress = _progress_at_start(stage, task_id, num_tasks, mine, pending, records)
    made, errors = _make_all(
        pending, job, of_configuration, workers or _default_workers(stage, job), progress, on_progress
    )
    return TaskReport(
        stage=stage,
        task_id=task_id,
        num_tasks=num_tasks,
        done_before=len(mine) - len(pending),
        records=(*records, *made),
        errors=tuple(errors),
        seconds=time.monotonic() - started,
    )


def cores() -> int:
    """Cores that this process may use: a Slurm job sees its own, not the node's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _default_workers(stage: DataStage, job: CorpusJob) -> int:
    return job.corpus.download_connections if stage == "download" else cores()


def _progress_at_start(
    stage: str,
    task_id: int,
    num_tasks: int,
    mine: Sequence[Unit],
    pending: Sequence[Unit],
    done: Sequence[Record],
) -> Progress:
    counts = sum((record.counts for record in done), Counts())
    total, left = sum(unit.size for unit in mine), sum(unit.size for unit in pending)
    return Progress(
        stage,
        task_id,
        num_tasks,
        units=len(mine),
        units_done=len(mine) - len(pending),
        bytes=total,
        bytes_done=total - left,
        documents=counts.documents_out,
        tokens=counts.tokens,
    )


def _make_all(
    pending: Sequence[Unit],
    job: CorpusJob,
    of_configuration: str,
    workers: int,
    progress: Progress,
    on_progress: Callable[[Progress], None] | None,
) -> tuple[list[Record], list[str]]:
    """The records of the units that could be made, and what was wrong with the others."""
    records: list[Record] = []
    errors: list[str] = []
    if not pending:
        if on_progress:
            on_progress(progress)
        return records, errors
    workers = min(workers, len(pending))
    threads = max(1, cores() // workers)
    with _executor(pending[0].stage, workers) as (executor, steps):
        futures: dict[Future[Record], Unit] = {
            executor.submit(_make, unit, job, of_configuration, threads): unit for unit in pending
        }
        for finished in _waited_for(futures, steps, progress, on_progress):
            unit = futures[finished]
            try:
                records.append(finished.result())
                progress.units_done += 1
            except HpcgenError as error:
                errors.append(f"{unit.name}: {error}")
                progress.failed += 1
            except BrokenProcessPool as error:
                raise HpcgenError(
                    f"{unit.name}: a worker process was killed",
                    "look for the out-of-memory killer; use fewer --workers",
                ) from error
    return records, errors


def _waited_for(
    futures: dict[Future[Record], Unit],
    steps: Any,
    progress: Progress,
    on_progress: Callable[[Progress], None] | None,
) -> Iterator[Future[Record]]:
    """The futures as they finish; between them, progress is told."""
    waiting = set(futures)
    while waiting:
        try:
            for finished in as_completed(waiting, timeout=_REPORT_INTERVAL_S):
                waiting.discard(finished)
                yield finished
        except TimeoutError:
            pass
        _take(steps, progress)
        if on_progress:
            on_progress(progress)


def _take(steps: Any, progress: Progress) -> None:
    """Adds up what the workers told since the last time."""
    while True:
        try:
            step: Step = steps.get_nowait()
        except queue.Empty:
            return
        progress.bytes_done += step.bytes
        progress.bytes_new += step.bytes
        progress.documents += step.documents
        progress.tokens += step.tokens


@contextmanager
def _executor(stage: DataStage, workers: int) -> Iterator[tuple[Executor, Any]]:
    """Processes, since parsing holds Python's lock; threads for downloads, which wait for the network."""
    if stage == "download":
        told: queue.Queue[Step] = queue.Queue()
        with ThreadPoolExecutor(workers, initializer=_start_thread, initargs=(told,)) as threads:
            yield threads, told
        return
    context = multiprocessing.get_context("spawn")
    steps = context.Queue()
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_process, initargs=(steps,)
    ) as processes:
        yield processes, steps


_worker = threading.local()
_process_steps: Any = None


def _start_thread(steps: Any) -> None:
    _worker.steps = steps


def _start_process(steps: Any) -> None:
    """A worker whose parent was killed ends as well."""
    global _process_steps
    _process_steps = steps
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _make(unit: Unit, job: CorpusJob, of_configuration: str, threads: int) -> Record:
    module, name = _WORK[unit.stage]
    work: Callable[[Unit, CorpusJob, Context], Record] = getattr(importlib.import_module(module), name)
    steps = _process_steps if _process_steps is not None else _worker.steps
    meter = _Meter(steps)
    record = work(unit, job, Context(configuration=of_configuration, threads=threads, advance=meter.add))
    meter.flush()
    if not record.counts.balanced:  # our own mistake, not the user's
        raise AssertionError(f"{unit.name}: documents are not accounted for: {record.counts}")
    return record


class _Meter:
    """Gathers steps, so that a queue between processes is used twice a second and not at every block."""

    def __init__(self, steps: Any) -> None:
        self._steps = steps
        self._sum = Step()
        self._last = time.monotonic()

    def add(self, step: Step) -> None:
        """Counts a step."""
        self._sum = Step(
            self._sum.bytes + step.bytes, self._sum.documents + step.documents, self._sum.tokens + step.tokens
        )
        if time.monotonic() - self._last >= _REPORT_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Tells what was counted."""
        self._steps.put(self._sum)
        self._sum = Step()
        self._last = time.monotonic()
