"""Sweeps: several variants of a run, planned and submitted."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpcgen.api.submission import require_submittable, submit
from hpcgen.errors import HpcgenError, JobFailed
from hpcgen.runs.slurm import Queue, ask_queue
from hpcgen.slurm.submittable import require_no_chain
from hpcgen.sweeps.assignments import combined
from hpcgen.sweeps.points import Sweep, plan_sweep, require_all
from hpcgen.sweeps.states import PointState, starts, states_of
from trainer.contract.problem import in_yaml

if TYPE_CHECKING:
    from hpcgen.slurm.job import Progress


def sweep(
    path: str | Path,
    values: Mapping[str, Sequence[object]],
    overrides: Sequence[str] = (),
    *,
    paired: bool = False,
) -> Sweep:
    """Plans a run for each combination of `values`, which maps keys such as "optimizer.lr" to their values.

    Each point has a directory of its own, in RUN_DIR/sweep. With `paired`, the points are the first values of all keys,
    their second values and so on. `overrides` apply to all points.

    Raises:
        ConfigErrors: points have mistakes. Lists all of them.
        HpcgenError: there is no point, or too many.
    """
    texts = {key: [f"{key}={in_yaml(value)}" for value in found] for key, found in values.items()}
    return plan_sweep(path, overrides, combined(texts, paired=paired))


def submit_sweep(
    sweep: Sweep,
    launcher: Literal["slurm", "local"] = "slurm",
    templates: Sequence[str | Path] = (),
    on_progress: Callable[[Progress], None] | None = None,
    *,
    max_running: int | None = None,
    retry: bool = False,
) -> Iterator[PointState]:
    """Submits a job for each point that is neither done nor in the queue. Yields the state of each point.

    A point that stopped continues. One that failed and would fail again is left out unless `retry` is set. At most
    `max_running` points run at once: each further one waits for the end of the one that many places before it. With
    "local", one point runs after another on this machine.

    Raises:
        ConfigErrors: points cannot be submitted. Lists all mistakes; nothing was submitted.
        HpcgenError: submission failed, or Slurm does not tell which points are in the queue. Earlier points stay in it.
        JobFailed: local points failed. Raised after the last one.
    """
    states = states_of(sweep, _queue(launcher))
    missing = [state.point for state in states if starts(state, retry=retry)]
    require_all(missing, lambda point: require_submittable(point.plan, launcher))
    if max_running is not None and launcher == "slurm":
        hint = "leave out max_running (--max-running)"
        require_all(
            missing,
            lambda point: require_no_chain(point.plan, list(point.plan.stages.values()), "no point", hint),
        )
    running: list[str] = []
    failures: list[str] = []
    for state in states:
        if not starts(state, retry=retry):
            running += [state.last_job] if state.last_job else []
            yield state
            continue
        after = running[-max_running] if max_running and len(running) >= max_running else None
        try:
            jobs = submit(state.point.plan, launcher, templates, _named(on_progress, state.point.name), after)
        except JobFailed as failure:  # only with "local"; the other points do not depend on this one
            failures.append(f"{state.point.name}: {failure}")
            continue
        running.append(jobs[-1].job_id)
        yield PointState(point=state.point, state="submitted", job=jobs[0].job_id, submitted=jobs[0])
    if failures:
        raise JobFailed("\n".join(failures))


def _named(on_progress: Callable[[Progress], None] | None, point: str) -> Callable[[Progress], None] | None:
    """Reports progress under the name of a point in place of its stage."""
    return on_progress and (lambda progress: on_progress(dataclasses.replace(progress, stage=point)))


def _queue(launcher: str) -> Queue:
    """This user's jobs; none for the local launcher.

    Raises:
        HpcgenError: Slurm does not answer.
    """
    queue = ask_queue([os.geteuid()]) if launcher == "slurm" else Queue()
    if queue.problem:
        raise HpcgenError(f"it is unknown which points are in the queue: {queue.problem}")
    return queue
