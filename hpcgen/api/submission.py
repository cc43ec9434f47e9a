"""Submission: the stages of a plan as jobs of Slurm, or on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpcgen.api.scripts import checked_script, template_directories, unset_secrets
from hpcgen.errors import HpcgenError
from hpcgen.run_plan.plan import Plan
from hpcgen.slurm.corpus import require_pairs
from hpcgen.slurm.submittable import require_this_machine

if TYPE_CHECKING:
    from hpcgen.slurm.job import Job, Progress


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
    from hpcgen.slurm import local, submit  # submitit is slow to import

    require_submittable(plan, launcher)
    if launcher == "local":
        return local.run_stages(plan, on_progress)
    directories = template_directories(plan.run, templates)
    return submit.submit_stages(
        plan, {name: checked_script(plan, name, directories) for name in plan.stages}, after
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
        require_this_machine(plan)
