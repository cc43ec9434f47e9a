"""Status of a corpus's stages, from the records and progress files that tasks write."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.concurrent_map import concurrent_map
from hpcgen.data.manifest import Manifest
from hpcgen.data.progress import TaskProgress, read_progress
from hpcgen.data.record import Counts, Record, rejects_text
from hpcgen.data.stages import DATA_STAGES, ROUTES
from hpcgen.data.stages.base import DataStage
from hpcgen.data.unit import Unit
from hpcgen.data.unit_checker import UnitChecker

STALLED_S = 120.0
"""Seconds without an update after which a task counts as killed or its host as down. Tasks write progress every 5 s."""

State = Literal["running", "stalled", "failed", "ended"]


@dataclass(frozen=True, kw_only=True)
class TaskStatus:
    """Status of a task that has unfinished units."""

    task_id: int
    num_tasks: int
    state: State
    """running; stalled: no update for STALLED_S; failed: ended with errors; ended: ended early without errors."""
    host: str
    silent_s: float
    """Seconds since the last update."""
    units_left: int
    failed: int
    """Number of unfinished units that failed."""
    errors: tuple[str, ...]
    """One message per failed unit, available when the task has ended."""


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """Status of a stage. A unit makes one output file, or the several output files of one input."""

    stage: str
    units: int
    done: int
    running: int
    """Unfinished units of running tasks."""
    failed: int
    """Unfinished units that failed."""
    missing: int
    """Unfinished units whose task has not started, is stalled, or ended without an error."""
    bytes: int
    """Total of the known input sizes on disk."""
    bytes_done: int
    """Bytes read. This field and the next two include the progress of running tasks."""
    documents: int
    tokens: int
    counts: Counts
    """Sum over the units that are done."""
    rejects: str
    """The number of rejected lines of each kind."""
    bytes_per_second: float
    """Combined rate of the running tasks."""
    remaining_s: float | None
    """Remaining time at that rate; None if no task runs or no size is known."""
    tasks: tuple[TaskStatus, ...]
    """Tasks with unfinished units and a progress file."""
    tokens_of_split: dict[str, int]
    """Tokens in finished pairs per split; empty for stages that make no pairs."""


@dataclass(frozen=True)
class _Unit:
    """A unit, its record if it is done, and the size of its inputs in bytes."""

    unit: Unit
    record: Record | None
    bytes: int


@dataclass
class _Sums:
    """Bytes read, and documents and tokens written."""

    bytes: int = 0
    documents: int = 0
    tokens: int = 0

    def add_unit(self, unit: _Unit) -> None:
        """Adds a unit if it is done."""
        if unit.record is not None:
            self.bytes += unit.bytes
            self.documents += unit.record.counts.documents_out
            self.tokens += unit.record.counts.tokens


def corpus_status(job: CorpusJob, manifest: Manifest, stages: Sequence[str], now: float) -> list[StageStatus]:
    """Determines the status of `stages` at `now` (Unix time in seconds). Default: all stages of the route in use.

    Raises:
        HpcgenError: the manifest or the tokenizer does not match the configuration.
    """
    reports = read_progress(job.directory)
    checker, sizes = UnitChecker(job), dict[str, int]()
    found = []
    with _gc_disabled():
        for name in stages or _stages_in_use(job.directory, {task.stage for task in reports}):
            all_units = _check_units(checker, list(DATA_STAGES[name].units(job, manifest)), sizes)
            of_stage = [task for task in reports if task.stage == name]
            found.append(_stage_status(DATA_STAGES[name], all_units, of_stage, now))
    return found if stages else [status for status in found if status.units]


def _stages_in_use(directory: Path, reported: Container[str]) -> list[str]:
    """The stages of every route that has started, in order. Default: the shortest route.

    A route has started if one of its own stages has: the download belongs to all routes, and so does the directory of
    the pairs.
    """

    def has_started(stage: DataStage) -> bool:
        return stage.name in reported or (not stage.makes_pairs and (directory / stage.folder).is_dir())

    shared = set(ROUTES[0]).intersection(*ROUTES)
    started = [route for route in ROUTES if any(map(has_started, set(route) - shared))]
    return [
        name for name, stage in DATA_STAGES.items() if any(stage in route for route in started or ROUTES[:1])
    ]


def _check_units(checker: UnitChecker, all_units: Sequence[Unit], sizes: dict[str, int]) -> list[_Unit]:
    """Returns every unit of a stage, with its record if it is done.

    `sizes` has the output sizes of earlier stages; those of this stage are added.
    """
    found = concurrent_map(all_units, lambda unit: _with_size(unit, checker.done_record(unit), sizes))
    records = (unit.record for unit in found if unit.record)
    sizes |= {output.name: output.size or 0 for record in records for output in record.outputs}
    return found


@contextlib.contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disables garbage collection, which takes a quarter of the time for 100,000 records and frees none of them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _with_size(unit: Unit, record: Record | None, sizes: Mapping[str, int]) -> _Unit:
    if record is not None:
        return _Unit(unit, record, sum(read.size or 0 for read in record.inputs))
    known = (sizes.get(item.name) for item in unit.inputs)
    pairs = zip(unit.inputs, known, strict=True)
    return _Unit(unit, None, sum(item.bytes_to_read() if size is None else size for item, size in pairs))


def _stage_status(
    stage: DataStage, all_units: Sequence[_Unit], reports: Sequence[TaskProgress], now: float
) -> StageStatus:
    """Determines the status of a stage from its units and its tasks' progress, the oldest first."""
    done, left = _Sums(), 0
    for unit in all_units:
        done.add_unit(unit)
        left += unit.record is None
    tasks = [_task_status(task, indices, all_units, now) for task, indices in _units_left(all_units, reports)]
    rate = 0.0
    for task in reports:
        if _state(task, now) == "running":
            rate += task.bytes_per_second
            _add_unfinished(done, task, all_units)
    total = sum(unit.bytes for unit in all_units)
    failed = sum(task.failed for task in tasks)
    running = sum(task.units_left - task.failed for task in tasks if task.state == "running")
    return StageStatus(
        stage=stage.name,
        units=len(all_units),
        done=len(all_units) - left,
        running=running,
        failed=failed,
        missing=left - running - failed,
        bytes=total,
        bytes_done=done.bytes,
        documents=done.documents,
        tokens=done.tokens,
        counts=_sum([unit.record.counts for unit in all_units if unit.record]),
        rejects=rejects_text(unit.record for unit in all_units if unit.record),
        bytes_per_second=rate,
        remaining_s=max(0, total - done.bytes) / rate if rate and total else None,
        tasks=tuple(sorted(tasks, key=lambda task: (task.num_tasks, task.task_id))),
        tokens_of_split=_tokens_of_split(all_units) if stage.makes_pairs else {},
    )


def _units_left(
    all_units: Sequence[_Unit], reports: Sequence[TaskProgress]
) -> Iterator[tuple[TaskProgress, list[int]]]:
    """Yields each task with its unfinished units. A unit shared by several tasks counts for the one updated last."""
    latest: list[int | None] = [None] * len(all_units)
    for number, task in enumerate(reports):
        for index in range(task.task_id, len(all_units), task.num_tasks):
            latest[index] = number
    left: dict[int, list[int]] = {}
    for index, owner in enumerate(latest):
        if owner is not None and all_units[index].record is None:
            left.setdefault(owner, []).append(index)
    return ((reports[number], indices) for number, indices in left.items())


def _task_status(
    task: TaskProgress, left: Sequence[int], all_units: Sequence[_Unit], now: float
) -> TaskStatus:
    names = {all_units[index].unit.name for index in left}
    errors = tuple(error for error in task.errors if error.partition(": ")[0] in names)
    state = _state(task, now)
    return TaskStatus(
        task_id=task.task_id,
        num_tasks=task.num_tasks,
        state="failed" if state == "ended" and errors else state,
        host=task.host,
        silent_s=max(0.0, now - task.updated),
        units_left=len(left),
        failed=min(task.failed, len(left)) if state == "running" else len(errors),
        errors=errors,
    )


def _state(task: TaskProgress, now: float) -> State:
    if task.ended:
        return "ended"
    return "running" if now - task.updated < STALLED_S else "stalled"


def _add_unfinished(done: _Sums, task: TaskProgress, all_units: Sequence[_Unit]) -> None:
    """Adds the part of a task's progress that is not in the records of its units yet."""
    recorded = _Sums()
    for unit in all_units[task.task_id :: task.num_tasks]:
        recorded.add_unit(unit)
    done.bytes += max(0, task.bytes_done - recorded.bytes)
    done.documents += max(0, task.documents - recorded.documents)
    done.tokens += max(0, task.tokens - recorded.tokens)


def _sum(counts: Sequence[Counts]) -> Counts:
    """Adds up counts by field, which is faster than Counts.total for a hundred thousand records."""
    names = [field.name for field in dataclasses.fields(Counts)]
    return Counts(**{name: sum(getattr(each, name) for each in counts) for name in names})


def _tokens_of_split(all_units: Sequence[_Unit]) -> dict[str, int]:
    """Tokens of finished pairs per split, from names such as tokens/train-00000-of-00072."""
    found: dict[str, int] = {}
    for unit in all_units:
        if unit.record is not None:
            split = unit.unit.name.rpartition("/")[2].partition("-")[0]
            found[split] = found.get(split, 0) + unit.record.counts.tokens
    return found
