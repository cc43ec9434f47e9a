"""The job array of a data stage: how many tasks it has, how many at a time, and how sbatch is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.corpus import num_outputs
from hpcgen.config.run import RunConfig
from hpcgen.config.slurm import ArraySettings
from hpcgen.config.stages import ARRAY_STAGES, section
from hpcgen.errors import Problem
from hpcgen.text import counted, ranges

NUM_TASKS = 8
"""Tasks of an array when nobody says."""
OF_OUTPUTS = frozenset(("concat", "tokenize", "prepare"))
"""Stages that make the corpus's output files: a task more than there are files would have nothing to do."""


@dataclass(frozen=True)
class Array:
    """A job array. Task t of it makes every num_tasks-th output of its stage, from t on."""

    num_tasks: int
    array_parallelism: int | None = None
    """Most tasks that run at the same time; None leaves it to Slurm."""

    def option(self, tasks: Sequence[int] | None = None) -> str:
        """The value of sbatch's --array for these tasks, in rising order (None: all): 0-3,7%2."""
        limit = f"%{self.array_parallelism}" if self.array_parallelism else ""
        return ranges(range(self.num_tasks) if tasks is None else tasks) + limit


def make_array(stage: str, config: RunConfig, cluster: ClusterConfig) -> Array | None:
    """The array of a stage; None for a stage that is a job of its own.

    More tasks than Slurm or the stage's outputs allow become fewer, each with more of the files.
    """
    if stage not in ARRAY_STAGES:
        return None
    settings: ArraySettings = getattr(config.slurm, section(stage))
    limits = [settings.num_tasks or NUM_TASKS, cluster.max_array_size]
    if (outputs := _outputs(stage, config)) is not None:
        limits.append(outputs)
    return Array(min(limits), settings.array_parallelism)


def array_warnings(stage: str, config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """More tasks asked for than the array gets."""
    array = make_array(stage, config, cluster)
    asked = getattr(config.slurm, section(stage)).num_tasks if array else None
    if array is None or asked is None or asked == array.num_tasks:
        return
    most, of_whom = cluster.max_array_size, "the cluster's max_array_size"
    if array.num_tasks < cluster.max_array_size:
        most, of_whom = array.num_tasks, "the number of output files"
    reason = (
        f"is more than {of_whom} ({most}): the array has {counted(most, 'task')}, each with more of the files"
    )
    yield Problem(f"slurm.{section(stage)}.num_tasks", reason, f"ask for at most {most}")


def _outputs(stage: str, config: RunConfig) -> int | None:
    corpus = config.data.corpus
    return sum(num_outputs(corpus).values()) if corpus and stage in OF_OUTPUTS else None
