"""States of the points of a sweep, from their run directories and Slurm's queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcgen.runs.attempts import read_attempts
from hpcgen.runs.failed import failed_text
from hpcgen.runs.slurm import Queue
from hpcgen.slurm.job import Job
from hpcgen.sweeps.points import Point, Sweep
from trainer.contract.files import finished
from trainer.contract.files.run_directory import RunDirectory

State = Literal["done", "in the queue", "failed", "missing", "submitted"]
"""`missing`: a new job continues or begins the run. `failed`: another attempt would fail in the same way."""


@dataclass(frozen=True, kw_only=True)
class PointState:
    """A point and its state."""

    point: Point
    state: State
    detail: str = ""
    """The reason of a failure, or what the job in the queue does or waits for."""
    job: str = ""
    """ID of the job that runs or waits."""
    last_job: str = ""
    """ID of the last of several jobs of the point."""
    submitted: Job | None = None
    """The job that was submitted now."""


def states_of(sweep: Sweep, queue: Queue) -> tuple[PointState, ...]:
    """The states of all points. `queue` is Slurm's answer about this user's jobs; empty without Slurm."""
    return tuple(_state(point, queue) for point in sweep.points)


def _state(point: Point, queue: Queue) -> PointState:
    # a training may have queued an evaluation, which continues without it
    if jobs := [job for job in queue.of_run(point.directory) if job.stage in point.plan.stages]:
        shown = next((job for job in jobs if not job.waits), jobs[0])
        last = max((job.job for job in jobs), key=lambda job: (len(job), job))
        return PointState(
            point=point, state="in the queue", detail=shown.in_words(), job=shown.job, last_job=last
        )
    if _is_done(point):
        return PointState(point=point, state="done")
    failure = failed_text(point.directory)
    return PointState(point=point, state="missing" if failure is None else "failed", detail=failure or "")


def unfinished(sweep: Sweep) -> list[Point]:
    """The points that are not done."""
    return [point for point in sweep.points if not _is_done(point)]


def _is_done(point: Point) -> bool:
    trainer = point.plan.trainer
    if trainer is None:  # a program, whose job decides when it is done
        attempts = read_attempts(point.directory)
        return bool(attempts) and attempts[-1].verdict == "done"
    run = RunDirectory.of(trainer)
    return finished.last_checkpoint(run, trainer) is not None or finished.is_marked(run, trainer)


def starts(state: PointState, *, retry: bool) -> bool:
    """True if a job is submitted for the point; with `retry`, also if it failed."""
    return state.state == "missing" or (retry and state.state == "failed")
