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
    log: Path
    submitit_job: Any


@dataclass(frozen=True)
class Progress:
    """How far a local stage is: `done` of `total` steps (0 of 0 when it cannot be told), and the last metrics."""

    stage: str
    done: int
    total: int
    metrics: dict[str, Any]
