"""How far the stages of a corpus are, from what every task leaves on disk: records of what is done, and progress."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.each import of_each
from hpcgen.data.manifest import Manifest
from hpcgen.data.record import Counts, Record
from hpcgen.data.unit import DATA_STAGES, DataStage, Looker, Unit, units

STALLED_S = 120.0
"""A task writes its progress every 5 s; one that has not for so long was killed, or its host is gone."""

State = Literal["running", "stalled", "failed", "ended"]


class TaskProgress(msgspec.Struct, frozen=True):
    """What a task last wrote of itself: hpcgen.data.task.Progress and where it runs."""

    stage: str
    task_id: int
    num_tasks: int
    host: str
    updated: float
    """Seconds since 1970, as `started`."""
    started: float
    ended: bool
    units: int = 0
    units_done: int = 0
    bytes: int = 0
    bytes_done: int = 0
    bytes_new: int = 0
    documents: int = 0
    tokens: int = 0
    failed: int = 0
    errors: list[str] = []
    """One for each of its units that failed, once it has ended: NAME: REASON."""

    @property
    def bytes_per_second(self) -> float:
        """At which it reads."""
        return self.bytes_new / max(self.updated - self.started, 1e-3)


@dataclass(frozen=True, kw_only=True)
class TaskStatus:
    """A task that has units left to make."""

    task_id: int
    num_tasks: int
    state: State
    """running; stalled: no word for STALLED_S; failed: it ended and said why; ended: it left units without a word."""
    host: str
    silent_s: float
    """Seconds since its last word."""
    units_left: int
    failed: int
    """Of these, the ones that could not be made."""
    errors: tuple[str, ...]
    """One for each that could not be made, once the task has ended."""


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """How far a stage is. A unit is a file to make, or the several output files that one input feeds."""

    stage: DataStage
    units: int
    done: int
    running: int
    """Not done, in a task that runs."""
    failed: int
    """Not done, and tried."""
    missing: int
    """Not done, and nobody is at it: their task was not started, is stalled, or ended without a word."""
    bytes: int
    """Of all inputs on disk, as far as their sizes are known."""
    bytes_done: int
    """These and the next two count what the running tasks have read and written so far as well."""
    documents: int
    tokens: int
    counts: Counts
    """Of the units that are done."""
    bytes_per_second: float
    """Of the tasks that run, together."""
    remaining_s: float | None
    """At that rate; None when nothing runs, or no size is known."""
    tasks: tuple[TaskStatus, ...]
    """Those that have units left and have said anything."""
    tokens_of_split: dict[str, int]
    """Tokens in the pairs that are done, of each split; empty for stages that make none."""


@dataclass(frozen=True)
class _Unit:
    """A unit, its record when it is done, and the bytes that it reads."""

    unit: Unit
    record: Record | None
    bytes: int


@dataclass
class _Sums:
    """Bytes read, documents and tokens written."""

    bytes: int = 0
    documents: int = 0
    tokens: int = 0

    def add_unit(self, unit: _Unit) -> None:
        """Counts a unit that is done."""
        if unit.record is not None:
            self.bytes += unit.bytes
            self.documents += unit.record.counts.documents_out
            self.tokens += unit.record.counts.tokens


def corpus_status(
    job: CorpusJob, manifest: Manifest, stages: Sequence[DataStage], now: float
) -> list[StageStatus]:
    """How far `stages` are at `now` (seconds since 1970). With none given: all on the way that was begun.

    Raises:
        HpcgenError: the manifest or the tokenizer is not what the configuration says.
    """
    told = _read_progress(job.directory)
    looker, sizes = Looker(job), dict[str, int]()
    found = []
    with _no_collection():
        for stage in stages or _way(job.directory, {task.stage for task in told}):
            all_units = _look_at(looker, units(stage, job, manifest), sizes)
            of_stage = [task for task in told if task.stage == stage]
            found.append(_stage_status(stage, all_units, of_stage, now))
    return found if stages else [status for status in found if status.units]


def _way(directory: Path, told: Container[str]) -> tuple[DataStage, ...]:
    """The stages from the source to pairs: the three with files between them once one was begun, else the one pass."""
    if not any(stage in told or (directory / stage).is_dir() for stage in ("extract", "concat", "tokenize")):
        return ("download", "prepare")
    return DATA_STAGES if "prepare" in told else ("download", "extract", "concat", "tokenize")


def _read_progress(directory: Path) -> list[TaskProgress]:
    """The last word of every task, the oldest first."""
    decoder = msgspec.json.Decoder(TaskProgress)
    told = []
    for path in (directory / "progress").glob("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # one that is not ours says nothing
            told.append(decoder.decode(path.read_bytes()))
    return sorted(told, key=lambda task: task.updated)


def _look_at(looker: Looker, all_units: Sequence[Unit], sizes: dict[str, int]) -> list[_Unit]:
    """Every unit of a stage, with its record when it is done.

    `sizes` holds those of the outputs that were looked at before, and gets those of this stage.
    """
    found = of_each(all_units, lambda unit: _looked_at(unit, looker.done_record(unit), sizes))
    records = (unit.record for unit in found if unit.record)
    sizes |= {output.name: output.size or 0 for record in records for output in record.outputs}
    return found


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No looking for garbage: of a hundred thousand records none is, and it would take a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _looked_at(unit: Unit, record: Record | None, sizes: Mapping[str, int]) -> _Unit:
    if record is not None:
        return _Unit(unit, record, sum(read.size or 0 for read in record.inputs))
    known = (sizes.get(item.name) for item in unit.inputs)
    pairs = zip(unit.inputs, known, strict=True)
    return _Unit(unit, None, sum(item.bytes_to_read() if size is None else size for item, size in pairs))


def _stage_status(
    stage: DataStage, all_units: Sequence[_Unit], told: Sequence[TaskProgress], now: float
) -> StageStatus:
    """How far a stage is whose tasks have `told` of themselves, the oldest first."""
    done, left = _Sums(), 0
    for unit in all_units:
        done.add_unit(unit)
        left += unit.record is None
    tasks = [_task_status(task, indices, all_units, now) for task, indices in _at(all_units, told)]
    rate = 0.0
    for task in told:
        if _state(task, now) == "running":
            rate += task.bytes_per_second
            _add_unfinished(done, task, all_units)
    total = sum(unit.bytes for unit in all_units)
    failed = sum(task.failed for task in tasks)
    running = sum(task.units_left - task.failed for task in tasks if task.state == "running")
    return StageStatus(
        stage=stage,
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
        bytes_per_second=rate,
        remaining_s=max(0, total - done.bytes) / rate if rate and total else None,
        tasks=tuple(sorted(tasks, key=lambda task: (task.num_tasks, task.task_id))),
        tokens_of_split=_tokens_of_split(all_units),
    )


def _at(all_units: Sequence[_Unit], told: Sequence[TaskProgress]) -> Iterator[tuple[TaskProgress, list[int]]]:
    """The tasks with the units that they have left. Of several tasks that had a unit, the last to speak has it."""
    last: list[int | None] = [None] * len(all_units)
    for number, task in enumerate(told):
        for index in range(task.task_id, len(all_units), task.num_tasks):
            last[index] = number
    left: dict[int, list[int]] = {}
    for index, at in enumerate(last):
        if at is not None and all_units[index].record is None:
            left.setdefault(at, []).append(index)
    return ((told[number], indices) for number, indices in left.items())


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
    """Adds what a task is ahead of the records of its units."""
    recorded = _Sums()
    for unit in all_units[task.task_id :: task.num_tasks]:
        recorded.add_unit(unit)
    done.bytes += max(0, task.bytes_done - recorded.bytes)
    done.documents += max(0, task.documents - recorded.documents)
    done.tokens += max(0, task.tokens - recorded.tokens)


def _sum(counts: Sequence[Counts]) -> Counts:
    """As sum() does it, without a dictionary for each of a hundred thousand."""
    names = [field.name for field in dataclasses.fields(Counts)]
    return Counts(**{name: sum(getattr(each, name) for each in counts) for name in names})


def _tokens_of_split(all_units: Sequence[_Unit]) -> dict[str, int]:
    """Outputs are named after their split: tokens/train-00000-of-00072."""
    found: dict[str, int] = {}
    for unit in all_units:
        directory, _, name = unit.unit.name.partition("/")
        if unit.record is not None and directory == "tokens":
            split = name.partition("-")[0]
            found[split] = found.get(split, 0) + unit.record.counts.tokens
    return found
