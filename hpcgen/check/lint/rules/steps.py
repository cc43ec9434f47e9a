"""The steps of a job: how srun starts the work on the nodes, with which tasks, CPUs and GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.script import Assignment

SHORT_JOB_S = 600
"""Time limit up to which a hang costs little."""


@rule(
    "no-kill-on-bad-exit",
    "warning",
    "one dead rank leaves the others waiting",
    source="Slurm, man srun, --kill-on-bad-exit; slurm.conf, KillOnBadExit",
)
def no_kill_on_bad_exit(job: Job) -> Iterator[Hit]:
    """When one task dies, the others wait for it in a collective until a timeout, or until the job's limit.

    --kill-on-bad-exit=1 (-K) ends the step at once. Jobs with a --time of at most ten minutes are not reported.
    """
    limit_s = job.time_limit_s
    if job.exported("SLURM_KILL_BAD_EXIT") or (limit_s is not None and limit_s <= SHORT_JOB_S):
        return
    talks = job.script.settings("MASTER_ADDR") or any(
        item.name.startswith("NCCL_") for item in job.script.exports
    )
    # the tasks of an unknown program wait for each other if the script sets up their communication
    others = [step for step in job.parallel_steps if step not in job.work_steps] if talks else []
    for step in (*job.work_steps, *others):
        tasks = job.num_tasks(step)
        many = tasks > 1 if tasks else job.has_many_tasks(step) or job.may_be_multi_node
        if many and not step.option("kill-on-bad-exit") and not step.is_open:
            yield Hit.at(
                step.line,
                "when one task fails, the others wait for it until a timeout or the time limit",
                "srun --kill-on-bad-exit=1",
            )


@rule(
    "cpus-not-inherited",
    "note",
    "tasks may get one CPU",
    source="Slurm, RELEASE_NOTES of 22.05; CHANGELOG/slurm-23.11.md, which reverts it",
    slurm=("22.05", "23.02"),
)
def cpus_not_inherited(job: Job) -> Iterator[Hit]:
    """In Slurm 22.05 and 23.02, srun does not inherit --cpus-per-task from the job.

    If tasks are bound to cores (--cpu-bind=cores, --exact, --hint=nomultithread, or the cluster's
    TaskPluginParam=Autobind), each gets one CPU. Otherwise the tasks share all CPUs of the job.

    Without --slurm-version, only calls of srun with --exact, --hint=nomultithread, --cpu-bind=cores or
    --cpu-bind=threads are reported, as notes. With it, these are warnings, and other calls of srun are notes.

    Slurm 23.11 and releases before 22.05 read SLURM_CPUS_PER_TASK.
    """
    cpus = job.number("cpus-per-task")
    if not cpus or cpus == 1 or job.exported("SRUN_CPUS_PER_TASK"):
        return
    for step in job.work_steps:
        binding = step.option("cpu-bind")
        is_bound = binding is not None and "mask" in binding.text
        by_cores = binding is not None and re.search(r"\b(cores|threads)\b", binding.text)
        hint = step.option("hint")
        binds = step.option("exact") or by_cores or (hint is not None and hint.text == "nomultithread")
        if (
            not is_bound
            and not step.option("cpus-per-task", "exclusive", "cpus-per-gpu")
            and not step.is_open
        ):
            yield Hit.at(
                step.line,
                f"srun of Slurm 22.05 and 23.02 ignores the job's --cpus-per-task={cpus}: if tasks are bound to "
                "cores (--cpu-bind=cores, --exact, --hint=nomultithread, Autobind), each gets one CPU",
                f"srun --cpus-per-task={cpus}",
                severity="warning" if binds else None,
                needs_release=not binds,
            )


@rule(
    "step-tasks",
    "warning",
    "srun ignores its --ntasks-per-node",
    source='Slurm, src/srun/opt.c, "can\'t honor --ntasks-per-node"; measured on 22.05',
)
def step_tasks(job: Job) -> Iterator[Hit]:
    """If directives set the number of tasks, --ntasks-per-node on srun has no effect by itself.

    srun prints a warning and starts as many tasks as the job has. With --ntasks, the option takes effect.
    """
    for step in job.work_steps:
        option = step.option("ntasks-per-node")
        wanted = option.value.number if option and option.value else None
        has = job.tasks_per_node(step)
        # with --nodes, newer releases honor it
        decided = not job.sets_tasks or step.option("ntasks", "nodes")
        if option and wanted and has and wanted != has and not decided:
            yield Hit.at(
                option.word.line,
                f"srun ignores --ntasks-per-node={wanted} and starts the job's {has} per node",
                f"srun --ntasks=$((SLURM_NNODES * {wanted})) --ntasks-per-node={wanted}",
            )


@rule(
    "step-outside-srun", "error", "one node of many runs the program", source="Slurm, man sbatch, DESCRIPTION"
)
def step_outside_srun(job: Job) -> Iterator[Hit]:
    """A batch script runs on the first node only. srun starts a program on all nodes.

    Launchers that reach the other nodes themselves, such as mpirun or deepspeed, are not reported.
    """
    nodes = job.nodes or 0
    through = {
        "srun", "horovodrun", "pdsh", "clush", "ssh", "ray", "parallel-ssh", "parallel", "jsrun", "aprun", "source",
        ".",
    }  # fmt: skip
    if (
        nodes < 2
        or job.mpi_calls
        or any(command.name in through for command in job.script.commands)
        or job.steps
    ):
        return
    for launch in job.trainings:
        is_certain = launch.command.words[0].certain and not launch.command.conditional
        if launch.launcher in ("torchrun", "accelerate", "python") and is_certain:
            yield Hit.at(
                launch.line,
                f"without srun, {launch.launcher} runs on the first of the {nodes} nodes only",
                "start it with srun",
            )


@rule(
    "too-many-agents",
    "error",
    "every task starts all ranks of its node",
    source="PyTorch, torch/distributed/run.py, --nproc-per-node",
)
def too_many_agents(job: Job) -> Iterator[Hit]:
    """torchrun starts all ranks of its node, so it needs one task per node: eight tasks start 64 ranks.

    Use srun --ntasks: in a job with eight tasks per node, srun ignores --ntasks-per-node=1 by itself.
    """
    for launch in job.launches:
        ranks = launch.option("nproc-per-node")
        if launch.launcher != "torchrun" or not ranks or ranks.text in ("1", ""):
            continue
        tasks = job.starts_per_node(launch)
        if tasks and tasks > 1:
            yield Hit.at(
                launch.line,
                f"each of the {tasks} tasks per node runs torchrun, which starts {ranks.text} ranks",
                'srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 torchrun, or python without torchrun',
            )


@rule(
    "few-gpus",
    "warning",
    "GPUs stay idle",
    source="CUDA, CUDA_VISIBLE_DEVICES; Slurm, gres.html, GPU Management",
)
def few_gpus(job: Job) -> Iterator[Hit]:
    """CUDA_VISIBLE_DEVICES=0,1 hides the other GPUs that the job requests. Slurm sets it to all of them.

    If Slurm manages the GPUs, srun overrides the value in each step, and the line is only misleading.
    """
    gpus, name = job.gpus_per_node, "CUDA_VISIBLE_DEVICES"
    if not gpus or not job.trainings:
        return
    settings = [
        item
        for item in job.script.settings(name)
        if not item.conditional and not item.function and item.outer is None
    ]
    for setting in settings:
        visible = _devices(setting)
        if 0 < len(visible) < gpus:
            why = f"the job requests {gpus} GPUs per node and uses {len(visible)}"
            if all(launch.step for launch in job.trainings):
                why = (
                    f"the job requests {gpus} GPUs per node, and this lists {len(visible)} of them: the others are "
                    "idle, unless Slurm manages the GPUs and srun overrides the variable"
                )
            yield Hit.at(setting.line, why, "remove it, or request fewer GPUs")
    own = [
        item
        for launch in job.trainings
        for item in launch.command.environment
        if item.name == name and launch.step is None
    ]
    used = set().union(*map(_devices, own))
    if not settings and len(own) == len(job.trainings) and all(map(_devices, own)) and len(used) < gpus:
        yield Hit.at(
            own[0].line,
            f"the job requests {gpus} GPUs per node and uses {len(used)}",
            "remove it, or request fewer GPUs",
        )


def _devices(setting: Assignment) -> set[str]:
    """The GPUs in a list of indices; empty if the list is not known."""
    word = setting.value
    is_list = word is not None and word.known and word.certain and re.fullmatch(r"\d+(,\d+)*", word.text)
    return set(word.text.split(",")) if word and is_list else set()


@rule("launch-twice", "note", "srun within srun", source="Slurm, man srun, DESCRIPTION")
def launch_twice(job: Job) -> Iterator[Hit]:
    """srun in the text of `srun bash -c` starts a step in every task."""
    for step in job.steps:
        outer = step.command.outer
        if outer is not None and job.script.commands[outer].name == "srun":
            yield Hit.at(step.line, "every task of the outer srun starts its own step", "call srun once")
