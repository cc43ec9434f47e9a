"""The job array of a data stage: how many tasks it has, how many at a time, and how sbatch is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.run import RunConfig
from hpcgen.config.slurm import ArraySettings
from hpcgen.errors import Problem
from hpcgen.stages import Stage
from hpcgen.text import counted, ranges

NUM_TASKS = 8
"""Tasks of an array when nobody says."""


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


def make_array(stage: Stage, config: RunConfig, cluster: ClusterConfig) -> Array | None:
    """The array of a stage; None for a stage that is a job of its own.

    More tasks than Slurm or the stage's outputs allow become fewer, each with more of the files.
    """
    settings = config.slurm.of(stage)
    if not isinstance(settings, ArraySettings):
        return None
    limits = [settings.num_tasks or NUM_TASKS, cluster.max_array_size]
    if (most := stage.max_tasks(config)) is not None:
        limits.append(most)
    return Array(min(limits), settings.array_parallelism)


def array_warnings(stage: Stage, config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """More tasks asked for than the array gets."""
    array = make_array(stage, config, cluster)
    settings = config.slurm.of(stage)
    asked = settings.num_tasks if isinstance(settings, ArraySettings) else None
    if array is None or asked is None or asked == array.num_tasks:
        return
    most, of_whom = cluster.max_array_size, "the cluster's max_array_size"
    if array.num_tasks < cluster.max_array_size:
        most, of_whom = array.num_tasks, "the number of output files"
    reason = (
        f"is more than {of_whom} ({most}): the array has {counted(most, 'task')}, each with more of the files"
    )
    yield Problem(f"slurm.{stage.section}.num_tasks", reason, f"ask for at most {most}")
