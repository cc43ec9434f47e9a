"""Slurm settings of a stage in a run file or a cluster profile."""

from __future__ import annotations

from typing import Annotated

from hpcgen.config.fields import Directive, SlurmWord, TimeLimit
from trainer.contract.config import Count, NonNegative, Range
from trainer.contract.config.section import config_section

LONGEST_LEAD_S = 65535
"""The largest number of seconds that sbatch --signal accepts."""


@config_section
class StageSettings:
    """Slurm resources of one stage. Null uses the value of `slurm.defaults`, then the cluster's."""

    nodes: Count | None = None
    """Number of nodes. Default: 1."""
    ntasks_per_node: Count | None = None
    """Tasks per node. Default: one per GPU for train and run, and 1 for stages without GPUs."""
    cpus_per_task: Count | None = None
    """CPUs per task. Default: an equal share of the node's CPUs, if the node type defines them."""
    mem: SlurmWord | None = None
    """Memory per node, such as 64G. Default: all memory for exclusive jobs, Slurm's default for others."""
    time: TimeLimit | None = None
    """Time limit in Slurm's format. It applies to each attempt of a requeued job."""
    partition: SlurmWord | None = None
    """Partition. Default: the cluster's default partition."""
    account: SlurmWord | None = None
    """Account to charge."""
    qos: SlurmWord | None = None
    """Quality of service (QOS)."""
    reservation: SlurmWord | None = None
    """Reservation to use."""
    constraint: SlurmWord | None = None
    """Required node features."""
    signal_lead_s: Annotated[int, Range(at_least=1, at_most=LONGEST_LEAD_S)] | None = None
    """Seconds before the time limit at which the job is asked to save a last checkpoint and stop. Default: for train,
    computed from the checkpoint's size; for run, 300."""
    max_restarts: NonNegative | None = None
    """Maximum number of times the job requeues itself. Default: 100."""
    extra_directives: tuple[Directive, ...] | None = None
    """Additional sbatch options, such as --mail-type=FAIL. They are added to the cluster's and override options of the
    same name."""


@config_section
class ArraySettings(StageSettings):
    """Slurm resources of each task of a stage that runs as a job array."""

    cpus_per_task: Count | None = None
    """CPUs of each task, which then shares its node with other jobs. Default: a full node, or 4 CPUs for download."""
    mem: SlurmWord | None = None
    """Memory of each task, such as 32G. Default: all memory for tasks with a full node, Slurm's default for others."""
    num_tasks: Count | None = None
    """Number of tasks in the array. Each processes its share of the files. Default: 8."""
    array_parallelism: Count | None = None
    """Maximum number of tasks that run at the same time; null for no limit."""
