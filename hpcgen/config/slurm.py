"""Slurm settings of a stage, the sections `slurm` of a run file and of a cluster profile (values for all stages and a
section for each stage), and the options of sbatch that follow from them."""

from __future__ import annotations

from dataclasses import field, fields, replace
from typing import Annotated, TypeVar

from hpcgen.config.fields import Directive, SlurmWord, TimeLimit
from hpcgen.config.sbatch_options import SBATCH_OPTIONS
from hpcgen.config.stages import STAGE_ROWS, StageRow, stage_called
from trainer.contract.config import Count, NonNegative, Range, field_hints
from trainer.contract.record import config_section

LONGEST_LEAD_S = 65535
"""The largest number of seconds that sbatch --signal accepts."""

PassedOn = Annotated[SlurmWord, "passed on"]
"""Value of a key that has the name of an option of sbatch, which gets it unchanged."""


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
    partition: PassedOn | None = None
    """Partition. Default: the cluster's default partition."""
    account: PassedOn | None = None
    """Account to charge."""
    qos: PassedOn | None = None
    """Quality of service (QOS)."""
    reservation: PassedOn | None = None
    """Reservation to use."""
    constraint: PassedOn | None = None
    """Required node features."""
    segment: Count | None = None
    """Number of nodes that Slurm places in one block, such as 16 of the 18 nodes of an NVLink domain. The number of
    nodes must be a multiple, or smaller: a job with fewer nodes is in one block. Applies to stages that use GPUs.
    Requires Slurm 24.05 (sbatch --segment)."""
    signal_lead_s: Annotated[int, Range(at_least=1, at_most=LONGEST_LEAD_S)] | None = None
    """Seconds before the time limit at which the job is asked to save a last checkpoint and stop. Default: for train,
    computed from the checkpoint's size; for run, 300."""
    max_restarts: NonNegative | None = None
    """Maximum number of times the job starts again, from the queue or on its nodes. Default: 100."""
    chain: Count | None = None
    """Maximum number of jobs that train one after another, for sites that forbid requeues. Each job of train or run
    then queues the next one, and never requeues itself. Default: null, a single job that requeues itself."""
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


SETTING_NAMES = tuple(each.name for each in fields(StageSettings))
"""The settings that every stage has."""


def _option(key: str) -> str:
    return key.replace("_", "-")


PASSED_ON = {_option(key): key for key, hint in field_hints(StageSettings).items() if hint == PassedOn | None}
"""Option of sbatch -> the key whose value it gets unchanged."""
OWN_OPTIONS = frozenset(_option(each.name) for each in fields(StageSettings)) & SBATCH_OPTIONS | {
    "job-name", "ntasks", "gpus-per-node", "gres", "gpus", "exclusive", "signal", "requeue", "no-requeue", "open-mode",
    "propagate", "output", "error", "array", "chdir", "wrap", "export",
}  # fmt: skip
"""Options that have the name of a key, or that the script relies on. They cannot be in `extra_directives`."""

T = TypeVar("T")


def _with_stages(cls: type[T]) -> type[T]:
    """Adds a field for each stage to a class before it becomes a dataclass."""
    for stage in STAGE_ROWS.values():
        settings = ArraySettings if stage.is_array else StageSettings
        cls.__annotations__[stage.section] = settings
        doc = f"Resources to {stage.summary}."
        documented = field(default_factory=settings, metadata={"doc": doc})
        setattr(cls, stage.section, documented)
    return cls


@config_section
@_with_stages
class SlurmConfig:
    """Slurm settings for all stages (`defaults`) and for each stage."""

    defaults: StageSettings = field(default_factory=StageSettings)
    """Defaults for all stages."""

    def of(self, stage: StageRow) -> StageSettings:
        """The section of a stage."""
        settings: StageSettings = getattr(self, stage.section)
        return settings


@config_section
@_with_stages
class ClusterSlurmConfig(StageSettings):
    """Slurm settings of a cluster profile: keys for all stages, and a section for each stage."""

    def of(self, stage: StageRow) -> StageSettings:
        """The section of a stage."""
        settings: StageSettings = getattr(self, stage.section)
        return settings

    def merged(self, stage: StageRow) -> StageSettings:
        """The section of a stage, with the values for all stages where it sets none."""
        own = self.of(stage)
        unset = (each.name for each in fields(StageSettings) if getattr(own, each.name) is None)
        return replace(own, **{name: getattr(self, name) for name in unset})


def section_called(word: str) -> str:
    """The section of the stage with this name, here or in other programs; empty if there is none."""
    stage = stage_called(word)
    return stage.section if stage else ""
