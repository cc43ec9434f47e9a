"""The job array of a data stage: its number of tasks, its parallelism, and its --array option."""

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
"""Default number of tasks in an array."""


@dataclass(frozen=True)
class Array:
    """A job array. Task t produces the outputs t, t + num_tasks, t + 2 num_tasks and so on."""

    num_tasks: int
    array_parallelism: int | None = None
    """Maximum number of tasks that run at the same time; None for no limit."""

    def option(self, tasks: Sequence[int] | None = None) -> str:
        """The value of sbatch's --array for `tasks` in ascending order (None: all), such as 0-3,7%2."""
        limit = f"%{self.array_parallelism}" if self.array_parallelism else ""
        return ranges(range(self.num_tasks) if tasks is None else tasks) + limit


def make_array(stage: Stage, config: RunConfig, cluster: ClusterConfig) -> Array | None:
    """The job array of a stage; None for a stage without one.

    The number of tasks is reduced to what Slurm and the number of outputs allow; each task then has more files.
    """
    settings = config.slurm.of(stage)
    if not isinstance(settings, ArraySettings):
        return None
    limits = [settings.num_tasks or NUM_TASKS, cluster.max_array_size]
    if (most := stage.max_tasks(config)) is not None:
        limits.append(most)
    return Array(min(limits), settings.array_parallelism)


def array_warnings(stage: Stage, config: RunConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """Yields a warning if the array gets fewer tasks than requested."""
    array = make_array(stage, config, cluster)
    settings = config.slurm.of(stage)
    asked = settings.num_tasks if isinstance(settings, ArraySettings) else None
    if array is None or asked is None or asked == array.num_tasks:
        return
    most, limit, more = cluster.max_array_size, "the cluster's max_array_size", ""
    if array.num_tasks < cluster.max_array_size:
        most, limit, more = (
            array.num_tasks,
            "the number of output files",
            ", or raise data.corpus.num_output_files",
        )
    reason = f"is more than {limit} ({most}), so the array gets only {counted(most, 'task')}"
    yield Problem(f"slurm.{stage.section}.num_tasks", reason, f"use at most {most}{more}")
