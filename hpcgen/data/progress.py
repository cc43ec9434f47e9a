"""Progress of a task: counted while it runs, and written to a file that `hpcgen data status` reads."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path

from trainer.contract.files.regular_file import read_bytes


@dataclass(frozen=True)
class Step:
    """Progress of a unit since its last report: bytes read from its inputs (on disk), documents and tokens written."""

    bytes: int = 0
    documents: int = 0
    tokens: int = 0

    def __add__(self, other: Step) -> Step:
        return Step(self.bytes + other.bytes, self.documents + other.documents, self.tokens + other.tokens)


@dataclass
class Progress:
    """Progress of a task. Bytes, documents and tokens include units that were already done."""

    stage: str
    task_id: int
    num_tasks: int
    units: int = 0
    units_done: int = 0
    bytes: int = 0
    """Size of the inputs on disk. An unknown size counts once it is read."""
    bytes_done: int = 0
    bytes_new: int = 0
    """Bytes read by this run, including those of failed units."""
    documents: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.time)
    """Unix time in seconds."""
    failed: int = 0

    def add(self, step: Step) -> None:
        """Adds the progress of a unit."""
        self.bytes_done += step.bytes
        self.bytes_new += step.bytes
        self.documents += step.documents
        self.tokens += step.tokens


@dataclass(kw_only=True)
class TaskProgress(Progress):
    """Content of a task's progress file."""

    host: str
    pid: int = 0
    updated: float
    """Unix time in seconds."""
    ended: bool
    errors: list[str] = field(default_factory=list)
    """One "NAME: REASON" per failed unit, written when the task ends."""

    @property
    def bytes_per_second(self) -> float:
        """Average read rate."""
        return self.bytes_new / max(self.updated - self.started, 1e-3)


def progress_path(directory: Path, stage: str, task_id: int, num_tasks: int) -> Path:
    """Progress file of a task of the corpus in `directory`."""
    return directory / "progress" / f"{stage}-{task_id:05d}-of-{num_tasks:05d}.json"


def read_progress(directory: Path) -> list[TaskProgress]:
    """Reads the progress files of all tasks, the oldest first."""
    import msgspec  # not at the top: stages can be planned without the extra `data`

    decoder = msgspec.json.Decoder(TaskProgress)
    reports = []
    for path in (directory / "progress").glob("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # skips files that are not progress files
            reports.append(decoder.decode(read_bytes(path)))
    return sorted(reports, key=lambda task: task.updated)
