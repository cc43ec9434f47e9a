"""One task of a stage's array: makes the task's units that are not done yet, on all of its cores."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.manifest import Manifest
from hpcgen.data.progress import Progress, Step, TaskProgress, progress_path
from hpcgen.data.record import SIDE_FILE, Counts, Record, record_path, rejects_text
from hpcgen.data.stages import DATA_STAGES
from hpcgen.data.stages.base import Context, DataStage
from hpcgen.data.unit import Unit, bytes_to_read, units_of_task
from hpcgen.data.unit_checker import UnitChecker, done_records
from hpcgen.data.workers import Failed, Finished, Update, cores, run_all
from hpcgen.errors import HpcgenError
from hpcgen.files import private_file, sweep
from hpcgen.text import counted, few, size_text
from trainer.contract.files.shared_files import refuse_foreign_link

_REPORT_INTERVAL_S = 0.5
_WRITE_INTERVAL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """Result of a task."""

    stage: str
    task_id: int
    num_tasks: int
    done_before: int
    """Number of units that were already done."""
    records: tuple[Record, ...]
    """Records of all finished units of the task, including units that were already done."""
    errors: tuple[str, ...]
    """One message for each failed unit. Nothing of a failed unit is published."""
    bytes_read: int
    """Bytes of inputs (on disk) that this run read."""
    seconds: float

    @property
    def counts(self) -> Counts:
        """Sum over all finished units."""
        return Counts.total(record.counts for record in self.records)

    @property
    def bytes_per_second(self) -> float:
        """Average rate at which this run read its inputs."""
        return self.bytes_read / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "stage": self.stage,
            "task_id": self.task_id,
            "num_tasks": self.num_tasks,
            "units": len(self.records) + len(self.errors),
            "done_before": self.done_before,
            "made": len(self.records) - self.done_before,
            "errors": list(self.errors),
            "counts": dataclasses.asdict(self.counts),
            "bytes_read": self.bytes_read,
            "seconds": round(self.seconds, 3),
        }

    @property
    def side_files(self) -> list[str]:
        """Files with rejected documents, relative to the corpus's directory."""
        outputs = (output.name for record in self.records for output in record.outputs)
        return sorted(name for name in outputs if name.endswith(SIDE_FILE))

    def __str__(self) -> str:
        counts, made = self.counts, len(self.records) - self.done_before
        failed = f", {len(self.errors):,} failed" if self.errors else ""
        lines = [
            f"{self.stage} task {self.task_id} of {self.num_tasks}: "
            f"{made:,} made, {self.done_before:,} already done{failed}"
        ]
        if counts.documents_in:
            lines.append(f"documents  {counts.documents_in:,} in = {counts.outcome}")
        if side_files := self.side_files:
            kinds = rejects_text(self.records)
            lines.append(f"rejects    {f'{kinds}; see ' if kinds else ''}{few(side_files, 1)}")
        if counts.tokens:
            lines.append(f"tokens     {counts.tokens:,} in {counted(counts.sequences, 'sequence')}")
        if counts.learned:
            lines.append(f"learned    {counts.learned_text}")
        lines += [f"warning    {warning}" for warning in counts.warnings]
        if counts.eod_in_text:
            lines.append(
                f"note       the text spells out {counted(counts.eod_in_text, 'end-of-document token')}"
            )
        rate = f" ({size_text(round(self.bytes_per_second))}/s)" if self.bytes_read else ""
        lines.append(f"read       {self.bytes_read:,} bytes in {self.seconds:,.1f} s{rate}")
        return "\n".join(lines)


def run_task(
    stage: str,
    job: CorpusJob,
    manifest: Manifest,
    *,
    task_id: int = 0,
    num_tasks: int = 1,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> TaskReport:
    """Makes the units of one task that are not done, `workers` at a time.

    Default: `DataStage.num_workers`.

    A failed unit does not stop the others. `on_progress` is called about twice a second. Every five seconds, progress
    is also written to the corpus's directory for `hpcgen data status`. Starts worker processes: a script that calls
    this function needs `if __name__ == "__main__":`.

    Raises:
        HpcgenError: an error that affects all units: no manifest, an invalid tokenizer, a task_id out of range.
    """
    if not 0 <= task_id < num_tasks:
        raise HpcgenError(
            f"task {task_id} is out of range for {counted(num_tasks, 'task')}", f"use 0 to {num_tasks - 1}"
        )
    started, kind = time.monotonic(), DATA_STAGES[stage]
    mine = units_of_task(list(kind.units(job, manifest)), task_id, num_tasks)
    task = _Task(kind, job, mine, Progress(stage, task_id, num_tasks, units=len(mine)), on_progress)
    task.make_all(workers or kind.num_workers(job) or cores())
    return TaskReport(
        stage=stage,
        task_id=task_id,
        num_tasks=num_tasks,
        done_before=task.done_before,
        records=tuple(task.records),
        errors=tuple(task.errors),
        bytes_read=task.progress.bytes_new,
        seconds=time.monotonic() - started,
    )


class _Task:
    """A running task: its units and their progress."""

    def __init__(
        self,
        stage: DataStage,
        job: CorpusJob,
        mine: Sequence[Unit],
        progress: Progress,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._stage, self._job = stage, job
        self._configuration = stage.configuration(job)
        self._progress_file = progress_path(job.directory, stage.name, progress.task_id, progress.num_tasks)
        self.progress = progress
        self._on_progress = on_progress
        self._reported_at = self._written_at = 0.0
        self.errors: list[str] = []
        before = done_records(mine, job, self._configuration)
        self.records = [record for record in before if record is not None]
        pending = [unit for unit, record in zip(mine, before, strict=True) if record is None]
        sizes = bytes_to_read(pending)
        # Largest first, so that all cores finish at about the same time.
        order = sorted(range(len(pending)), key=lambda index: -sizes[index])
        self._pending = [pending[index] for index in order]
        self._sizes = [sizes[index] for index in order]
        self._steps = [Step() for _ in pending]
        """Progress reported so far, per pending unit."""
        self.done_before = progress.units_done = len(self.records)
        progress.bytes_done = sum(read.size or 0 for record in self.records for read in record.inputs)
        progress.bytes = progress.bytes_done + sum(sizes)
        counts = Counts.total(record.counts for record in self.records)
        progress.documents, progress.tokens = counts.documents_out, counts.tokens

    def make_all(self, workers: int) -> None:
        """Makes the units that are not done."""
        directories = _output_directories(self._pending, self._job)
        refuse_foreign_links(self._job, {self._progress_file.parent, *directories})
        if self._pending:
            # A missing package is found here, before anything is written.
            for module in self._stage.modules(self._pending):
                importlib.import_module(module)
        self._report(ended=not self._pending)
        if not self._pending:
            return
        self._sweep()
        work = partial(make_unit, job=self._job, settings_hash=self._configuration)
        try:
            with closing(run_all(work, self._pending, workers, _REPORT_INTERVAL_S)) as events:
                for event in events:
                    self._handle(event)
                    self._report()
        except BaseException as error:
            self._sweep()
            self._report(ended=True, interrupted=type(error).__name__)
            raise
        if self.errors:
            self._sweep()  # a killed worker could not remove its own files
        self._report(ended=True)

    def _sweep(self) -> None:
        """Removes private files of dead processes: first from earlier runs, at the end from this run."""
        directory = self._job.directory
        sweep(
            place
            for unit in self._pending
            for place in (
                *(directory / name for name in (*unit.files, *unit.side_files)),
                record_path(directory / unit.name),
            )
        )

    def _handle(self, event: Update | Finished | Failed | None) -> None:
        """Updates the progress. The counts of a unit's record replace what the unit reported while it ran."""
        progress = self.progress
        if event is None:
            return
        reported, size = self._steps[event.index], self._sizes[event.index]
        if isinstance(event, Update):
            step: Step = event.message
            self._steps[event.index] = reported + step
            progress.add(step)
            return
        counts = event.result.counts if isinstance(event, Finished) else Counts()
        progress.documents += counts.documents_out - reported.documents
        progress.tokens += counts.tokens - reported.tokens
        if isinstance(event, Finished):
            self.records.append(event.result)
            progress.units_done += 1
            progress.bytes += max(0, reported.bytes - size)
            progress.bytes_done += max(0, size - reported.bytes)
        else:
            self.errors.append(f"{self._pending[event.index].name}: {event.reason}")
            progress.failed += 1
            progress.bytes_done -= reported.bytes

    def _report(self, ended: bool = False, interrupted: str = "") -> None:
        """Calls `on_progress` and writes the progress file, each at a fixed interval."""
        now = time.monotonic()
        if self._on_progress and (ended or now - self._reported_at >= _REPORT_INTERVAL_S):
            self._reported_at = now
            self._on_progress(self.progress)
        if not ended and now - self._written_at < _WRITE_INTERVAL_S:
            return
        progress = self.progress
        status = TaskProgress(
            **dataclasses.asdict(progress),
            host=socket.gethostname(),
            pid=os.getpid(),
            updated=time.time(),
            errors=[*self.errors, *([f"ended by {interrupted}"] if interrupted else [])] if ended else [],
            ended=ended,
        )
        target = self._progress_file
        try:
            with private_file(target, swept=bool(self._written_at)) as file:  # sweep only the first time
                file.write(json.dumps(dataclasses.asdict(status), indent=1).encode() + b"\n")
                file.flush()  # no fsync: readers see a complete file anyway
                Path(file.name).replace(target)
        except OSError:
            pass  # the units report full disks and similar errors
        self._written_at = now


def make_unit(
    unit: Unit,
    report: Callable[[Step], None],
    num_cores: Callable[[], int],
    *,
    job: CorpusJob,
    settings_hash: str,
) -> Record:
    """Makes one unit in a worker process. `report` sends its progress to the parent.

    Raises:
        HpcgenError: another user placed a link where the unit reads or writes, or the work fails.
    """
    refuse_foreign_links(job, {*_output_directories([unit], job), *(item.path for item in unit.inputs)})
    UnitChecker(job).require_inputs(unit)
    meter = _Meter(report)
    context = Context(configuration=settings_hash, num_cores=num_cores, advance=meter.add)
    record = DATA_STAGES[unit.stage].make(unit, job, context)
    meter.flush()
    return record


def refuse_foreign_links(job: CorpusJob, paths: Iterable[Path]) -> None:
    """Refuses paths in a shared corpus with a symbolic link that another user placed.

    Raises:
        HpcgenError: there is one. Its target may be a file that only this user can read or write.
    """
    for path in paths if job.share == "group" else ():
        if path.is_relative_to(job.directory):
            try:
                refuse_foreign_link(path, job.directory)
            except OSError as error:
                raise HpcgenError(f"{error.filename} {error.strerror}") from error


def _output_directories(units: Iterable[Unit], job: CorpusJob) -> set[Path]:
    return {(job.directory / name).parent for unit in units for name in unit.files}


class _Meter:
    """Adds up steps and reports them to the parent twice a second instead of at every block."""

    def __init__(self, report: Callable[[Step], None]) -> None:
        self._report = report
        self._sum = Step()
        self._last = time.monotonic()

    def add(self, step: Step) -> None:
        """Adds a step."""
        self._sum += step
        if time.monotonic() - self._last >= _REPORT_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Reports the steps added since the last report."""
        self._report(self._sum)
        self._sum = Step()
        self._last = time.monotonic()
