"""Submitted jobs, and the progress of a local one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """A submitted stage."""

    stage: str
    job_id: str
    """Job ID. For an array, the ID of the array."""
    log: Path
    """Path of the log. For an array, with * in place of the task index."""
    submitit_job: Any
    """submitit's handle for results and logs. For an array, a list with one per task."""
    tasks: tuple[int, ...] | None = None
    """Indices of the stage's tasks that the job runs, if it is an array."""


@dataclass(frozen=True)
class Progress:
    """Progress of a local stage: `done` of `total` steps or files (0 of 0 if unknown), and the last metrics."""

    stage: str
    done: int
    total: int
    metrics: dict[str, Any]
