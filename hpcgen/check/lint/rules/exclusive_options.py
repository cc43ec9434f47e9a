"""Options of sbatch and srun that exclude each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.rule import Hit, Severity, rule
from hpcgen.config.sbatch_options import EXCLUSIVE_OPTIONS

REFUSED_BY_SRUN = (("exact", "whole"), ("exclusive", "overlap"))
"""Pairs that srun refuses (src/srun/opt.c)."""
_NEWER: Mapping[tuple[str, str], tuple[Severity, str]] = {
    ("exclusive", "oversubscribe"): ("warning", "23.02"),
    ("gres", "gpus-per-node"): ("note", "26.05"),
}
"""Pairs that newer releases refuse -> severity, and the first of these releases. Before, the last one won."""
_INHERITED = frozenset(
    ("ntasks-per-node", "ntasks-per-gpu", "gpus-per-task", "gpus-per-socket", "tres-per-task")
)
"""Directives that srun reads from the job's environment, and that contradict its own options."""
_MEMORY = {
    "SLURM_MEM_PER_CPU": "mem-per-cpu",
    "SLURM_MEM_PER_GPU": "mem-per-gpu",
    "SLURM_MEM_PER_NODE": "mem",
}
"""Variables of srun -> their options."""


@rule(
    "exclusive-options",
    "error",
    "options that exclude each other",
    source="Slurm 22.05 to 26.05, src/common/slurm_opt.c and src/srun/opt.c; measured on 22.05",
)
def exclusive_options(job: Job) -> Iterator[Hit]:
    """sbatch and srun refuse some pairs of options, such as --mem and --mem-per-cpu, and start nothing.

    srun also compares its own options with those of the job, which Slurm puts into the environment. Pairs that only
    newer releases refuse get a warning or a note.
    """
    own = job.script.options
    for first, second in _pairs(own, EXCLUSIVE_OPTIONS):
        yield Hit.at(
            max(job.script.option_line(first), job.script.option_line(second)),
            f"sbatch refuses --{first} together with --{second}",
            "remove one of them",
        )
    for (first, second), (severity, release) in _NEWER.items():
        if first in own and second in own and (first != "gres" or "gpu" in own["gres"]):
            yield Hit.at(
                max(job.script.option_line(first), job.script.option_line(second)),
                f"since Slurm {release}, sbatch refuses --{first}{'=gpu' * (first == 'gres')} together with --{second}",
                "remove one of them",
                severity=severity,
            )
    for step in job.steps:
        given = {option.name: option.word for option in step.options}
        for first, second in _pairs(given, (*EXCLUSIVE_OPTIONS, *REFUSED_BY_SRUN)):
            why = f"srun refuses --{first} together with --{second}"
            yield Hit.at(max(given[first].line, given[second].line), why, "remove one of them")
        for first, second in _pairs({*given, *(_INHERITED & own.keys())}, EXCLUSIVE_OPTIONS):
            if (first in given) != (second in given):
                mine, other = (first, second) if first in given else (second, first)
                why = f"srun refuses --{mine} in a job with --{other}"
                yield Hit.at(given[mine].line, why, f"remove it, or `#SBATCH --{other}`")
    yield from _memory_of_the_environment(job)


def _pairs(given: Collection[str], pairs: Collection[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    return (pair for pair in pairs if pair[0] in given and pair[1] in given)


def _memory_of_the_environment(job: Job) -> Iterator[Hit]:
    """Exports that contradict the memory of the job in the environment of every srun without memory options."""
    limits = [name for name in ("mem", "mem-per-cpu", "mem-per-gpu") if name in job.script.options]
    steps = [step for step in job.steps if not step.option("mem", "mem-per-cpu", "mem-per-gpu")]
    for name, option in _MEMORY.items():
        setting = job.exported(name)
        if setting and steps and limits and option not in limits:
            yield Hit.at(
                setting.line,
                f"srun refuses {name} in a job with --{limits[0]}",
                f"remove it, or `#SBATCH --{limits[0]}`",
            )
