"""The four functions that the command line and Python programs call: load_run, plan, render, submit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpcgen.check.checked_script import checked_script
from hpcgen.config.directories import configuration_directories, readable
from hpcgen.config.loader import Run, load_run
from hpcgen.errors import HpcgenError
from hpcgen.planning.plan import Plan, plan
from hpcgen.slurm.corpus import check_pairs, require_pairs

if TYPE_CHECKING:
    from hpcgen.slurm.job import Job, Progress

__all__ = ["Plan", "Run", "load_run", "plan", "render", "site_directories", "submit"]


def render(plan: Plan, stage: str, templates: Sequence[str | Path] = ()) -> str:
    """The batch script of one stage of `plan`; nothing is written.

    `templates` are directories of site templates, looked in before HPCGEN_TEMPLATES, the user's and the
    system's configuration directory, and the shipped templates.

    Raises:
        HpcgenError: a stage that was not planned; a template that is missing, unreadable, writable by strangers,
            or wrong; pairs of the corpus that were made with other settings or of other files than the run's.
    """
    if stage not in plan.stages:
        raise HpcgenError(f"stage {stage!r} is not planned", f"planned are {', '.join(plan.stages)}")
    check_pairs(plan)
    return checked_script(plan, stage, site_directories(templates)).text


def submit(
    plan: Plan,
    launcher: Literal["slurm", "local"] = "slurm",
    templates: Sequence[str | Path] = (),
    on_progress: Callable[[Progress], None] | None = None,
) -> list[Job]:
    """Submits the stages of `plan` with submitit, each after the one before it.

    With "slurm" the jobs are queued and the call returns. With "local" the stages run on this machine through
    submitit's local executor, one after another; the call returns when they are done and tells `on_progress`
    how far they are.

    Of the stages that make the corpus, the tasks are queued that have something left to make; a stage without
    any has no job.

    Raises:
        HpcgenError: nothing could be submitted, or is: pairs of the corpus are not made, or not those of the run.
        JobFailed: a local stage failed.
    """
    from hpcgen.slurm.local import run_stages
    from hpcgen.slurm.submit import submit_stages

    if launcher not in ("slurm", "local"):
        raise HpcgenError(f"{launcher!r} is not a launcher", "use slurm or local")
    if rendered := [name for name, stage in plan.stages.items() if not stage.kind.by_submitit]:
        hint = f"hpcgen render {rendered[0]} ... | sbatch"
        raise HpcgenError(f"stage {rendered[0]} is rendered only, submitit does not run it", hint)
    making_pairs = [name for name, stage in plan.stages.items() if stage.kind.makes_pairs]
    if len(making_pairs) > 1:
        raise HpcgenError(
            f"stages {' and '.join(making_pairs)} make the same files",
            "submit extract concat tokenize, or prepare alone",
        )
    if unset := unset_secrets(plan):
        raise HpcgenError(
            f"secrets name {', '.join(unset)}, which this environment does not have", "export them"
        )
    require_pairs(plan)
    if launcher == "local":
        return run_stages(plan, on_progress)
    directories = site_directories(templates)
    return submit_stages(plan, {name: checked_script(plan, name, directories) for name in plan.stages})


def unset_secrets(plan: Plan) -> list[str]:
    """Names of secrets that the planned stages take from the submitting shell, and that are not set here."""
    names = dict.fromkeys(name for stage in plan.stages.values() for name in stage.secrets)
    return [name for name in names if not os.environ.get(name)]


def site_directories(templates: Sequence[str | Path] = ()) -> list[Path]:
    """The directories of site templates: those given, HPCGEN_TEMPLATES (separated by ':'), the configuration's."""
    named = [Path(part) for part in os.environ.get("HPCGEN_TEMPLATES", "").split(os.pathsep) if part]
    configured = [path for path in configuration_directories("templates") if path.is_dir()]
    given = [Path(directory) for directory in templates]
    readable(directory / "slurm" for directory in (*given, *named, *configured))
    for directory in given:
        if directory.is_dir() and not any(directory.glob("slurm/*.sbatch.j2")):
            raise HpcgenError(
                f"{directory}: holds no template", "its files are slurm/train.sbatch.j2 and the like"
            )
    return [*given, *named, *configured]
