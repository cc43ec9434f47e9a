"""Submits stages to Slurm with submitit, from the same plan and the same template as the rendered script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcgen.errors import HpcgenError
from hpcgen.launchers.job import Job
from hpcgen.launchers.run_directory import make_run_directory, sharing
from hpcgen.launchers.tasks import ModuleTask
from hpcgen.planning.plan import Plan
from hpcgen.planning.stage import StagePlan
from hpcgen.rendering.script import Script, render_stage

TASK_LOGS = ('say "the tasks\' own logs: $run_dir/submitit/${SLURM_JOB_ID}_*_log.out"',)
"""submitit gives every task a file of its own, and the job's log does not have them."""

SRUN_AS_A_STEP = ('srun() { ((terminated)) || launch "$@"; }',)
"""submitit's srun line then runs as the script's: in the background, so that traps work; not when cancelled."""


def submit_stages(plan: Plan, site_directories: Sequence[Path]) -> list[Job]:
    """Queues the planned stages, each to start when the one before it has succeeded.

    Raises:
        HpcgenError: a template is wrong, there is no Slurm here, or Slurm refuses a job.
    """
    scripts = {name: render_stage(plan, name, site_directories) for name in plan.stages}
    with sharing(plan):
        run_dir = make_run_directory(plan)
        jobs: list[Job] = []
        for stage in plan.stages.values():
            jobs.append(_submit(plan, stage, scripts[stage.name], run_dir, after=jobs[-1] if jobs else None))
    return jobs


def _submit(plan: Plan, stage: StagePlan, script: Script, run_dir: Path, after: Job | None) -> Job:
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        executor = SlurmExecutor(run_dir / "submitit", python=task_python(stage))
        executor.update_parameters(**submitit_parameters(stage, script, after.job_id if after else None))
        submitted = executor.submit(_task(plan, stage))
    except (FailedJobError, FailedSubmissionError, RuntimeError, OSError) as error:
        raise HpcgenError(f"stage {stage.name} was not submitted: {error}") from error
    log = run_dir / f"{stage.name}-{submitted.job_id}.log"
    return Job(stage.name, submitted.job_id, log, submitted)


def task_python(stage: StagePlan) -> str:
    """The shell words with which the rendered script too starts its Python."""
    return f'"${{container[@]}}" env "${{task_environment[@]}}" {stage.python}'


def submitit_parameters(stage: StagePlan, script: Script, after: str | None) -> dict[str, Any]:
    """submitit's public parameters: the script's directives, its lines around the launch, and its srun options."""
    setup, teardown = script.around_launch()
    options: dict[str, Any] = {}
    for directive in script.directives():
        name, equals, value = directive.removeprefix("--").partition("=")
        options[name.replace("-", "_") if name != "open-mode" else name] = (
            value.strip('"') if equals else True
        )
    dependency = {"dependency": f"afterok:{after}", "kill-on-invalid-dep": "yes"} if after else {}
    return {
        # these two tell submitit how many tasks to expect results of
        "nodes": stage.allocation.nodes,
        "ntasks_per_node": stage.allocation.ntasks_per_node,
        "wckey": None,
        "stderr_to_stdout": True,
        "additional_parameters": options | dependency,
        "setup": [*setup, *TASK_LOGS, *SRUN_AS_A_STEP],
        "teardown": teardown,
        "srun_args": [*stage.allocation.srun_options()],
    }


def _task(plan: Plan, stage: StagePlan) -> ModuleTask:
    if stage.name != "train":
        return ModuleTask(stage.arguments, {})
    arguments = (*stage.arguments, "--config", "$TRAINER_CONFIG", "--stop-file", "$TRAINER_STOP_FILE")
    return ModuleTask(arguments, {}, stopped_marker=f"{plan.config.paths.run_dir}/STOPPED")
