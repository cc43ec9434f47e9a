"""Submits stages to Slurm with submitit, from the same plan and templates as the rendered script."""

from __future__ import annotations

import io
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError

from hpcgen.errors import HpcgenError
from hpcgen.run_plan.plan import Plan
from hpcgen.run_plan.stage import StagePlan
from hpcgen.slurm.corpus import check_corpus, missing_tasks
from hpcgen.slurm.job import Job
from hpcgen.slurm.refusal import advice
from hpcgen.slurm.rendering.filters import shell_word
from hpcgen.slurm.rendering.script import Script
from hpcgen.slurm.run_directory import make_run_directory, sharing
from hpcgen.slurm.sbatch import waiting_is_said, warn_of_leaks
from hpcgen.slurm.shell import reach_job, shell_settings, without
from hpcgen.slurm.submittable import require_no_chain
from hpcgen.slurm.tasks import ModuleTask
from trainer.contract.files.run_directory import RunDirectory

MARK = "--hpcgen-task"
"""Marker in submitit's launch line between srun's options and its command."""

SRUN_STARTS_THE_JOB = (
    "# submitit calls srun with its options and command. They are added to the script's, and the job begins.",
    "srun() {",
    "    unset -f srun",
    f'    while [[ $1 != {MARK} ]]; do step+=("$1"); shift; done',
    '    task=("${@:2}") submitted=1',
    "    main",
    "}",
)

SRUN_STARTS_MAIN = (
    "# submitit calls srun. The job then runs its own command.",
    "srun() { unset -f srun; main; }",
)

SINGLE_TASK = ("SLURM_ARRAY_JOB_ID=$SLURM_JOB_ID SLURM_ARRAY_TASK_ID=0",)
"""Makes a job without an array look like an array with one task, because submitit queues a single task
without an array. The variables are not exported, since submitit reads them in the job."""


ACCEPTED = re.compile(
    r"timed out|Unable to contact|Zero Bytes|sense of sbatch output|not UTF-8|ended without a message"
)
"""Errors of sbatch, or of submitit, that also occur after Slurm accepted the job."""


def submit_stages(plan: Plan, scripts: Mapping[str, Script], after: str | None = None) -> list[Job]:
    """Queues the planned stages with their scripts. Each starts after the previous one succeeds, and the first one
    after the end of the job `after`, whatever its result.

    Only array tasks with missing outputs are queued. A stage without missing outputs is not queued.

    Raises:
        HpcgenError: Slurm is not installed or refuses a job, or the corpus cannot be fetched or does not fit.
    """
    before = list(plan.stages.values())[:-1]
    require_no_chain(plan, before, "no stage", "submit the later stages when the run is done")
    missing = missing_tasks(plan)
    for warning in check_corpus(plan, missing):
        print(f"warning: {warning}", file=sys.stderr)
    warn_of_leaks({name for script in scripts.values() for name in reach_job(script.directives())})
    with sharing(plan):
        run_dir = make_run_directory(plan)
        jobs: list[Job] = []
        for stage in plan.stages.values():
            tasks = missing.get(stage.name)
            if tasks != ():
                dependency = f"afterok:{jobs[-1].job_id}" if jobs else after and f"afterany:{after}"
                with _queued_jobs_are_named(jobs, stage):
                    jobs.append(_submit(plan, stage, scripts[stage.name], run_dir, dependency, tasks))
    return jobs


@contextmanager
def _queued_jobs_are_named(jobs: Sequence[Job], stage: StagePlan) -> Iterator[None]:
    """If submitting the stage ends in any other way than success, prints the jobs that are in the queue."""
    try:
        yield
    except BaseException as error:
        if jobs:
            queued = ", ".join(f"{job.job_id} ({job.stage})" for job in jobs)
            ids = " ".join(job.job_id for job in jobs)
            print(f"already queued: {queued}; to cancel them: scancel {ids}", file=sys.stderr)
        if isinstance(error, KeyboardInterrupt) or ACCEPTED.search(str(error)):
            name = next(option[11:] for option in stage.directives if option.startswith("--job-name="))
            print(
                f"Slurm may have accepted {stage.name} before: look for {name} in squeue --me before you submit again",
                file=sys.stderr,
            )
        raise


def _submit(
    plan: Plan,
    stage: StagePlan,
    script: Script,
    run_dir: Path,
    dependency: str | None,
    tasks: tuple[int, ...] | None,
) -> Job:
    """Queues a stage. For an array, queues `tasks`."""
    own_command = _runs_own_command(plan, stage)
    try:
        with ExitStack() as stack:
            folder = run_dir / "submitit"
            # Others could replace the folder, and the job needs nothing in it.
            if plan.config.share == "group":
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            executor = SlurmExecutor(folder, python=shell_word(stage.python))
            parameters = submitit_parameters(stage, script, dependency, tasks, own_command=own_command)
            executor.update_parameters(**parameters)
            stack.enter_context(waiting_is_said(stage.name))
            stack.enter_context(redirect_stderr(io.StringIO()))  # submitit prints the error that it raises
            stack.enter_context(without((*reach_job(script.directives()), *shell_settings())))
            if tasks is None:
                submitted: Any = executor.submit(_task(plan, stage))
                job_id, of_task = submitted.job_id, ""
            else:
                submitted = executor.map_array(_task(plan, stage), [f"--task-id={task}" for task in tasks])
                job_id, of_task = submitted[0].job_id.partition("_")[0], "_*"
    except (FailedJobError, FailedSubmissionError, RuntimeError, OSError) as error:
        answer = _answer(error)
        raise HpcgenError(
            f"stage {stage.name} was not submitted: {answer}", advice(answer, plan, stage)
        ) from error
    return Job(stage.name, job_id, run_dir / f"{stage.name}-{job_id}{of_task}.log", submitted, tasks)


def _answer(error: Exception) -> str:
    """The message of sbatch. A plugin of the site may write another encoding, which submitit does not show."""
    if isinstance(error.__cause__, UnicodeDecodeError):
        return f"the answer of sbatch is not UTF-8: {error.__cause__.object!r}"
    return str(error) or "sbatch ended without a message"


def _runs_own_command(plan: Plan, stage: StagePlan) -> bool:
    """True if the job runs the script's command. submitit's needs Python in the image, and unpickles a file of this job
    only, which others could replace in a shared run."""
    return stage.kind.runs_user_program or plan.config.share == "group" or "chain" in stage.values


def submitit_parameters(
    stage: StagePlan,
    script: Script,
    dependency: str | None,
    tasks: tuple[int, ...] | None = None,
    *,
    own_command: bool = False,
) -> dict[str, Any]:
    """submitit's public parameters, with the script's directives and definitions. Its main starts submitit's command,
    or with `own_command` the script's.

    `tasks` are the tasks of the stage's array. submitit numbers them from 0.
    """
    setup = script.definitions()
    options: dict[str, Any] = {}
    for directive in script.directives():
        name, equals, value = directive.removeprefix("--").partition("=")
        options[name.replace("-", "_") if name != "open-mode" else name] = (
            value.strip('"') if equals else True
        )
    options.pop("array", None)
    if tasks is not None:
        task_ids = f"task_ids=({' '.join(map(str, tasks))})"
        setup = [*(SINGLE_TASK if len(tasks) == 1 else ()), *setup, task_ids]
    if tasks is not None and len(tasks) == 1:
        options["output"] = options["output"].replace("%A_%a", "%j_0")
    if own_command:
        # submitit always asks for a signal, and its USR2 would kill the tasks. CONT does nothing.
        options.setdefault("signal", "B:CONT@1")
    waits = {"dependency": dependency, "kill-on-invalid-dep": "yes"} if dependency else {}
    return {
        # these two tell submitit the number of tasks with results
        "nodes": stage.allocation.nodes,
        "ntasks_per_node": stage.allocation.ntasks_per_node,
        "wckey": None,
        "stderr_to_stdout": True,
        "additional_parameters": options | waits,
        "setup": [
            *setup,
            *(SRUN_STARTS_MAIN if own_command else (_task_logs(tasks), *SRUN_STARTS_THE_JOB)),
        ],
        "srun_args": [MARK],
        **_parallelism(stage, tasks),
    }


def _task_logs(tasks: tuple[int, ...] | None) -> str:
    """The setting for the files in which submitit writes each task's output, separate from the job's log."""
    is_array = tasks is not None and len(tasks) > 1
    job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if is_array else "$SLURM_JOB_ID"
    return f'task_logs="$run_dir/submitit/{job}"_*_log.out'


def _parallelism(stage: StagePlan, tasks: tuple[int, ...] | None) -> dict[str, Any]:
    """Maximum number of array tasks that run at once. submitit has no value for "unlimited"."""
    array = stage.allocation.array
    if array is None or tasks is None:
        return {}
    return {"array_parallelism": array.array_parallelism or len(tasks)}


def _task(plan: Plan, stage: StagePlan) -> ModuleTask:
    if stage.kind.runs_user_program:
        return ModuleTask((), {})  # never called
    config = ("--config", f"${stage.kind.config_variable}") if stage.kind.config_variable else ()
    arguments = (*stage.arguments, *config)
    if not stage.kind.has_stop_file:
        return ModuleTask(arguments, {})
    stopped = f"{plan.config.paths.run_dir}/{RunDirectory.STOPPED}"
    return ModuleTask((*arguments, "--stop-file", "$TRAINER_STOP_FILE"), {}, stopped_marker=stopped)
