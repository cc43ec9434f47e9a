"""The GPU of each task."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Step
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.words import Word


@rule(
    "local-rank",
    "warning",
    "a task looks for a GPU that it does not see",
    source="Slurm, man srun, --gpus-per-task and --gpu-bind; measured on 22.05",
)
def local_rank(job: Job) -> Iterator[Hit]:
    """With --gpus-per-task=1, a task sees one GPU, with index 0. LOCAL_RANK=$SLURM_LOCALID then names GPUs beyond it.

    CUDA fails with "invalid device ordinal". --ntasks-per-gpu and --gpu-bind=single:1 also bind each task to a GPU.
    """
    if not _local_ranks(job) or any(item.name == "CUDA_VISIBLE_DEVICES" for item in job.script.assignments):
        return
    for step in job.work_steps:
        bound = _one_gpu_per_task(job, step)
        if bound and _tasks_share_nodes(job, step):
            line, option = bound
            yield Hit.at(
                line,
                f"because of {option}, each task sees one GPU, with index 0, but LOCAL_RANK is $SLURM_LOCALID",
                _fix(job, step, option),
            )


def _fix(job: Job, step: Step, option: str) -> str:
    if option.startswith("--gpu-bind"):
        return f"remove {option}"
    return f"--gpus-per-node={job.tasks_per_node(step) or '<GPUs of a node>'} instead of {option}"


def _local_ranks(job: Job) -> bool:
    """True if the script passes SLURM_LOCALID to the program as its local rank."""
    items = [
        *job.script.assignments,
        *(item for command in job.script.commands for item in command.environment),
    ]
    if any(item.name == "LOCAL_RANK" and _is_local_id(item.value) for item in items):
        return True
    options = [
        flag
        for launch in job.launches
        for name, flag in launch.flags.items()
        if re.fullmatch("local[-_]rank", name)
    ]
    return any(_is_local_id(flag.value) for flag in options)


def _is_local_id(word: Word | None) -> bool:
    return word is not None and bool(re.fullmatch(r'"?\$\{?SLURM_LOCALID\}?"?', word.source))


def _one_gpu_per_task(job: Job, step: Step) -> tuple[int, str] | None:
    """Line and text of the option that binds each task of a step to one GPU."""
    binding = step.option("gpu-bind")
    how = binding.text if binding else job.script.options.get("gpu-bind", "")
    if how and not re.search(r"single:|per_task:1$|map_gpu:", how):
        return None
    given = {name: (job.script.option_line(name), value) for name, value in job.script.options.items()}
    given |= {option.name: (option.word.line, option.text) for option in step.options}
    for name, pattern in (
        ("gpu-bind", r"(verbose,)?(single:1|per_task:1|map_gpu:.*)"),
        ("gpus-per-task", r"(\w+:)?1"),
        ("ntasks-per-gpu", r"\d+"),
        ("tres-per-task", r".*gpu(:\w+)?[:=]1"),
    ):
        line, value = given.get(name, (0, ""))
        if re.fullmatch(pattern, value):
            return line, f"--{name}={value}"
    return None


def _tasks_share_nodes(job: Job, step: Step) -> bool:
    """True if a node certainly has several tasks of a step."""
    tasks, option = job.num_tasks(step), step.option("nodes")
    nodes = option.value.number if option and option.value else job.nodes
    return (job.tasks_per_node(step) or 0) > 1 or (tasks is not None and nodes is not None and tasks > nodes)
