"""Slurm settings of a stage, as a run file and a cluster profile give them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from hpcgen.config.fields import Directive, SlurmWord, TimeLimit
from trainer.contract.config import FORBID_UNKNOWN_KEYS, Count, NonNegative


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """What one stage asks of Slurm. Null takes the value of `slurm.defaults`, then the cluster's."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    nodes: Count | None = None
    """Nodes of the job; 1 when nobody says."""
    ntasks_per_node: Count | None = None
    """Tasks per node; null means one per GPU for train, and one for stages without GPUs."""
    cpus_per_task: Count | None = None
    """CPUs per task; null shares the node's CPUs out evenly, where the node type knows them."""
    mem: SlurmWord | None = None
    """Memory of the job on each node, such as 64G; null leaves it to Slurm, and an exclusive job gets all."""
    time: TimeLimit | None = None
    """Time limit of one life of the job, in Slurm's form."""
    partition: SlurmWord | None = None
    """Partition; null means the cluster's default."""
    account: SlurmWord | None = None
    """Account that is charged."""
    qos: SlurmWord | None = None
    """Quality of service."""
    reservation: SlurmWord | None = None
    """Reservation to run in."""
    constraint: SlurmWord | None = None
    """Node features that are required."""
    signal_lead_s: Count | None = None
    """Seconds between the warning signal and the time limit; null computes it from the checkpoint's size."""
    max_restarts: NonNegative | None = None
    """Times the job may put itself back into the queue; 100 when nobody says."""
    extra_directives: tuple[Directive, ...] | None = None
    """More sbatch options, each as written after #SBATCH, such as --mail-type=FAIL. They follow the cluster's own, and
    replace those of the same name."""


@dataclass(frozen=True, kw_only=True)
class ArraySettings(StageSettings):
    """What a stage that runs as a job array asks of Slurm, for each of its tasks."""

    cpus_per_task: Count | None = None
    """CPUs of each task, which then shares its node with other jobs; null takes a whole node, for download 4 CPUs."""
    mem: SlurmWord | None = None
    """Memory of each task, such as 32G; null leaves it to Slurm, and a task that has a whole node gets all."""
    num_tasks: Count | None = None
    """Tasks of the array, each of which works through its share of the files; null means 8."""
    array_parallelism: Count | None = None
    """Most tasks that run at the same time; null leaves it to Slurm."""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """Slurm settings for all stages (`defaults`) and for each."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    defaults: StageSettings = field(default_factory=StageSettings)
    """For every stage that does not say otherwise."""
    image: StageSettings = field(default_factory=StageSettings)
    """For making the container image."""
    download: ArraySettings = field(default_factory=ArraySettings)
    """For fetching the files of the corpus."""
    extract: ArraySettings = field(default_factory=ArraySettings)
    """For uncompressing them."""
    concat: ArraySettings = field(default_factory=ArraySettings)
    """For joining them into num_output_files files."""
    tokenize: ArraySettings = field(default_factory=ArraySettings)
    """For making a .bin/.idx pair of each of these."""
    prepare: ArraySettings = field(default_factory=ArraySettings)
    """For making the same pairs from the compressed files in one pass."""
    index_cache: StageSettings = field(default_factory=StageSettings)
    """For building Megatron's sample indices before GPUs wait for them."""
    train: StageSettings = field(default_factory=StageSettings)
    """For the training stage."""
    nccl_test: StageSettings = field(default_factory=StageSettings)
    """For the measurement of the network between GPUs."""
    node_health: StageSettings = field(default_factory=StageSettings)
    """For the check of nodes."""
    tensorboard: StageSettings = field(default_factory=StageSettings)
    """For TensorBoard over the run directory."""
