"""The Python interface, also used by the command line: load_run, plan, layouts, predict, render and
submit, and for several runs sweep, submit_sweep and compare."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpcgen.config.directories import configuration_directories, readable, with_templates_of
from hpcgen.config.loader import Run, load_run
from hpcgen.errors import HpcgenError, JobFailed
from hpcgen.run_plan.plan import Plan, plan
from hpcgen.slurm.corpus import check_pairs, require_pairs
from hpcgen.slurm.rendering.script import Script, render_stage
from trainer.contract.problem import in_yaml

if TYPE_CHECKING:
    from hpcgen.run_plan.layouts.result import RunLayouts
    from hpcgen.run_plan.prediction import Prediction
    from hpcgen.runs.slurm import Queue
    from hpcgen.slurm.job import Job, Progress
    from hpcgen.sweeps.comparison import Comparison, Metric
    from hpcgen.sweeps.points import Sweep
    from hpcgen.sweeps.states import PointState

__all__ = [
    "Plan",
    "Run",
    "compare",
    "layouts",
    "load_run",
    "plan",
    "predict",
    "render",
    "site_directories",
    "submit",
    "submit_sweep",
    "sweep",
]


def layouts(
    run: Run,
    nodes: Sequence[int] = (),
    top: int = 10,
    finish_in_s: float | None = None,
    budget: float | None = None,
    gpu_hours: float | None = None,
    on_search: Callable[[int], object] = lambda num_nodes: None,
) -> RunLayouts:
    """Finds the layouts with which a run trains fastest, on each of several numbers of nodes.

    `nodes` are the numbers to try. Default: the run's own number. With a goal, the default is each of 1, 2, 3, 4, 6, 8,
    12, 16 and so on that may meet it, up to the limit of the partition. At most one goal is given: `finish_in_s` is a
    deadline in seconds, `budget` an amount in the profile's currency, and `gpu_hours` a number of GPU-hours.
    `on_search` is called with the number of nodes before each search.

    Raises:
        NoPrediction: the time of the run's steps is unknown, or the run is finished.
        ConfigErrors: the run has mistakes that no layout corrects.
        HpcgenError: no layout fits into memory.
    """
    from hpcgen.run_plan.layouts.find import find_layouts

    return find_layouts(
        run, nodes, top, finish_in_s=finish_in_s, budget=budget, gpu_hours=gpu_hours, on_search=on_search
    )


def predict(plan: Plan) -> Prediction:
    """Predicts the time of a step of the training in `plan`, and the time, GPU-hours, energy and price of the run.

    Raises:
        NoPrediction: `plan` has no training, or one whose time cannot be predicted. The message has the reason.
    """
    from hpcgen.run_plan import prediction

    return prediction.predict(plan)


def render(plan: Plan, stage: str, templates: Sequence[str | Path] = ()) -> str:
    """Returns the batch script of one stage of `plan`. Writes nothing.

    `templates` are directories of site templates. They are searched before HPCGEN_TEMPLATES, the user's and the
    site's configuration directory, and the shipped templates.

    Raises:
        HpcgenError: the stage is not in the plan; a template is missing, unreadable, writable by other users, or
            invalid; or the corpus's pairs were made with settings or from files that differ from the run's.
    """
    if stage not in plan.stages:
        raise HpcgenError(f"stage {stage!r} is not in the plan", f"planned stages: {', '.join(plan.stages)}")
    check_pairs(plan)
    return _checked_script(plan, stage, template_directories(plan.run, templates)).text


def submit(
    plan: Plan,
    launcher: Literal["slurm", "local"] = "slurm",
    templates: Sequence[str | Path] = (),
    on_progress: Callable[[Progress], None] | None = None,
    after: str | None = None,
) -> list[Job]:
    """Submits the stages of `plan` with submitit. Each starts after the previous one has succeeded.

    With "slurm", the jobs are queued and the call returns. The first one starts after the end of the job with the ID
    `after`, whatever its result. With "local", the stages run on this machine with
    submitit's local executor, one after another. The call reports to `on_progress` and returns when all are done.

    Data stages submit only the tasks that still have output to produce. A stage without such tasks gets no job.

    Raises:
        HpcgenError: submission failed, or pairs of the corpus are missing or belong to another run.
        JobFailed: a local stage failed.
    """
    from hpcgen.slurm.local import run_stages
    from hpcgen.slurm.submit import submit_stages

    require_submittable(plan, launcher)
    if launcher == "local":
        return run_stages(plan, on_progress)
    directories = template_directories(plan.run, templates)
    return submit_stages(
        plan, {name: _checked_script(plan, name, directories) for name in plan.stages}, after
    )


def require_submittable(plan: Plan, launcher: str) -> None:
    """Raises what `submit` would raise before it submits anything.

    Raises:
        HpcgenError: see `submit`.
    """
    if launcher not in ("slurm", "local"):
        raise HpcgenError(f"unknown launcher {launcher!r}", "use slurm or local")
    if rendered := [name for name, stage in plan.stages.items() if not stage.kind.by_submitit]:
        hint = f"use hpcgen render {rendered[0]} ... | sbatch"
        raise HpcgenError(f"stage {rendered[0]} cannot be submitted with submitit", hint)
    making_pairs = [name for name, stage in plan.stages.items() if stage.kind.makes_pairs]
    if len(making_pairs) > 1:
        raise HpcgenError(
            f"stages {' and '.join(making_pairs)} produce the same files",
            "submit either prepare, or extract concat tokenize",
        )
    if unset := unset_secrets(plan):
        raise HpcgenError(
            f"secrets contains {', '.join(unset)}, not set in this environment",
            "export the missing variables",
        )
    require_pairs(plan)
    if launcher == "local":
        from hpcgen.slurm.local import require_this_machine

        require_this_machine(plan)


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
    from hpcgen.sweeps.assignments import combined
    from hpcgen.sweeps.points import plan_sweep

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
    from hpcgen.slurm.submit import require_no_chain
    from hpcgen.sweeps.points import require_all
    from hpcgen.sweeps.states import PointState, starts, states_of

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
    from hpcgen.runs.slurm import Queue, ask_queue

    queue = ask_queue([os.geteuid()]) if launcher == "slurm" else Queue()
    if queue.problem:
        raise HpcgenError(f"it is unknown which points are in the queue: {queue.problem}")
    return queue


def compare(sweep: Sweep, metric: Metric | None = None) -> Comparison:
    """Compares the losses of the points at the same number of tokens, the best first.

    `metric`: "valid" or "train". Default: "valid" if all points that train have been evaluated.
    """
    from hpcgen.sweeps.comparison import compare_runs

    return compare_runs(sweep.directories, metric)


def unset_secrets(plan: Plan) -> list[str]:
    """Names of the planned stages' secrets that are not set in this environment."""
    names = dict.fromkeys(name for stage in plan.stages.values() for name in stage.secrets)
    return [name for name in names if not os.environ.get(name)]


def site_directories(templates: Sequence[str | Path] = ()) -> list[Path]:
    """Site template directories: `templates`, HPCGEN_TEMPLATES (separated by ':'), and configuration directories."""
    named = [Path(part) for part in os.environ.get("HPCGEN_TEMPLATES", "").split(os.pathsep) if part]
    configured = [path for path in configuration_directories("templates") if path.is_dir()]
    given = [Path(directory) for directory in templates]
    readable(directory / "slurm" for directory in (*given, *named, *configured))
    for directory in given:
        if directory.is_dir() and not any(directory.glob("slurm/*.sbatch.j2")):
            raise HpcgenError(
                "contains no templates",
                "they must be in slurm/, such as slurm/train.sbatch.j2",
                where=directory,
            )
    return [*given, *named, *configured]


def template_directories(run: Run, templates: Sequence[str | Path] = ()) -> list[Path]:
    """The site template directories of a run, whose profile may be named by its path."""
    return with_templates_of(run.sites, site_directories(templates))


def _checked_script(plan: Plan, stage: str, site_directories: Sequence[Path]) -> Script:
    """The batch script of one stage, checked by bash if a site's template contributed to it."""
    script = render_stage(plan, stage, site_directories)
    for each in (script, script.queued):
        # the shipped templates are tested, and the check takes 50 ms
        if each is not None and each.uses_site_templates:
            from hpcgen.check.shell_programs import require_syntax

            require_syntax(each)
    return script
