"""The allocation of a stage: its nodes and tasks, and the options of sbatch and srun that request them."""

from __future__ import annotations

from collections.abc import Sequence

from hpcgen.config.fields import seconds, slurm_time
from hpcgen.config.slurm import PASSED_ON, StageSettings
from hpcgen.text import ranges
from trainer.contract.record import record

MAX_RESTARTS = 100


@record
class Array:
    """A job array. Task t produces the outputs t, t + num_tasks, t + 2 num_tasks and so on."""

    num_tasks: int
    array_parallelism: int | None = None
    """Maximum number of tasks that run at the same time; None for no limit."""

    def option(self, tasks: Sequence[int] | None = None) -> str:
        """The value of sbatch's --array for `tasks` in ascending order (None: all), such as 0-3,7%2."""
        limit = f"%{self.array_parallelism}" if self.array_parallelism else ""
        return ranges(range(self.num_tasks) if tasks is None else tasks) + limit


@record(kw_only=True)
class Allocation:
    """The nodes and tasks of one stage, and how they are requested."""

    nodes: int
    """Nodes that the step runs on."""
    ntasks_per_node: int
    cpus_per_task: int | None
    gpus_per_node: int
    gres: str
    """The cluster profile's `gres`."""
    exclusive: bool
    settings: StageSettings
    """The stage's settings, from the run file and the cluster profile."""
    cpu_masks: tuple[str, ...] = ()
    spare_nodes: int = 0
    """Nodes of the job in addition to `nodes`, which can replace bad ones."""
    no_kill: bool = False
    """The job continues when a node fails, either with a spare or to report the node."""
    ranks_per_node: int = 1
    """Number of ranks on each node. Differs from `ntasks_per_node` if a task starts several ranks."""
    nvlink_nodes: int = 1
    """Number of nodes of the step whose GPUs are all connected by NVLink."""
    segment: int | None = None
    """Number of nodes that Slurm places in one block; None to leave the choice to Slurm."""
    mpi: str | None = None
    """srun's --mpi for the tasks; None for Slurm's default."""
    array: Array | None = None
    """The job array; None for other jobs. With an array, all other fields apply to each task."""

    @property
    def num_tasks(self) -> int:
        """Number of tasks of the job."""
        return self.nodes * self.ntasks_per_node

    @property
    def num_job_nodes(self) -> int:
        """Number of nodes of the job, with its spare nodes."""
        return self.nodes + self.spare_nodes

    @property
    def num_segments(self) -> int:
        """Number of segments of the job."""
        return self.num_job_nodes // self.segment if self.segment else 1

    @property
    def nodes_per_segment(self) -> int | None:
        """Number of nodes of a segment that the step uses: all, or an equal part of each segment of the job.

        None if the spare nodes are neither whole segments nor equal parts of all segments.
        """
        if self.segment and self.nodes % self.segment == 0:
            return self.segment
        return None if self.nodes % self.num_segments else self.nodes // self.num_segments

    @property
    def time_s(self) -> int:
        """The time limit in seconds; 0 if there is none."""
        return seconds(self.settings.time) if self.settings.time else 0

    @property
    def max_restarts(self) -> int:
        """Maximum number of times the job requeues itself."""
        return MAX_RESTARTS if self.settings.max_restarts is None else self.settings.max_restarts

    def resource_options(self) -> dict[str, str | bool]:
        """Long sbatch options that request resources. True stands for an option without a value."""
        options: dict[str, str | bool | None] = {
            "nodes": str(self.num_job_nodes),
            "segment": _text(self.segment),
            "no-kill": self.no_kill or None,
            "ntasks-per-node": str(self.ntasks_per_node),
            "cpus-per-task": _text(self.cpus_per_task),
            **self._gpu_options(),
            "exclusive": self.exclusive or None,
            # --exclusive allocates all CPUs, but only the default memory
            "mem": self.settings.mem or ("0" if self.exclusive else None),
            "time": slurm_time(self.time_s),
            **{option: getattr(self.settings, key) for option, key in PASSED_ON.items()},
            "array": self.array.option() if self.array else None,
        }
        return {name: value for name, value in options.items() if value is not None}

    def srun_options(self) -> tuple[str, ...]:
        """srun options for the step that runs all tasks. srun inherits neither --cpus-per-task nor a CPU binding."""
        options = [
            f"--nodes={self.nodes}",
            f"--ntasks={self.num_tasks}",
            f"--ntasks-per-node={self.ntasks_per_node}",
        ]
        if self.cpus_per_task:
            options.append(f"--cpus-per-task={self.cpus_per_task}")
        if self.cpu_masks:
            options.append(f"--cpu-bind=mask_cpu:{','.join(self.cpu_masks)}")
        if self.mpi:
            options.append(f"--mpi={self.mpi}")
        # --distribution=block overrides SLURM_DISTRIBUTION, with which the ranks of a tensor-parallel group may be on
        # several nodes. Without masks, Slurm would give the tasks of a node CPUs of each socket in turn, although the
        # GPUs of neighboring tasks are on one socket. --kill-on-bad-exit: one failed rank ends the step. --export=ALL
        # overrides sbatch --export=NONE. --label prefixes each log line with its rank.
        has_neighbors = self.ntasks_per_node > 1 and not self.cpu_masks
        distribution = "block:block" if has_neighbors else "block"
        return (*options, f"--distribution={distribution}", "--kill-on-bad-exit=1", "--export=ALL", "--label")

    def _gpu_options(self) -> dict[str, str]:
        if not self.gpus_per_node:
            return {}
        if self.gres == "gpus-per-node":
            return {"gpus-per-node": str(self.gpus_per_node)}
        return {"gres": self.gres}


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)
