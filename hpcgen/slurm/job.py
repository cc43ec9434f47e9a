"""What submitting gives back: the jobs, and how far a local one is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """A submitted stage. `submitit_job` is submitit's own handle, for results and logs of single tasks."""

    stage: str
    job_id: str
    """Of an array: the number that stands for all of its tasks."""
    log: Path
    """Of an array: with * for the index of the task within it."""
    submitit_job: Any
    """Of an array: a list, one for each task."""
    tasks: tuple[int, ...] | None = None
    """Of an array: the tasks of the stage that it makes, by index."""


@dataclass(frozen=True)
class Progress:
    """How far a local stage is: `done` of `total` steps, or of files (0 of 0 when it cannot be told), and the last
    metrics of training."""

    stage: str
    done: int
    total: int
    metrics: dict[str, Any]
