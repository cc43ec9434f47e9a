"""What a stage is: a kind of job, with everything that the rest of hpcgen asks about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hpcgen.config.loader import Run
    from hpcgen.config.run import RunConfig
    from hpcgen.config.slurm import StageSettings
    from hpcgen.errors import Problem
    from hpcgen.planning.allocation import Allocation
    from trainer.contract.config import TrainerConfig

RENDEZVOUS = {
    "MASTER_ADDR": "address of the step's first node, as scontrol knows it",
    "MASTER_PORT": "10000 to 29999, from the job ID, its restarts and its steps; a later port where it is taken",
    "WORLD_SIZE": "ranks of the step",
}
"""Variables by which ranks meet, and how the script of every stage with ranks computes them."""

RENDEZVOUS_ID = {
    "TRAINER_RENDEZVOUS_ID": "random, for each attempt: by it the ranks know each other where MASTER_PORT is taken"
}
"""Computed along with RENDEZVOUS."""

TRAINER_CONFIG = {"TRAINER_CONFIG": "RUN_DIR/jobs/JOBID/trainer.json"}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a stage runs, and the host paths that it touches."""

    arguments: tuple[str, ...] = ()
    """What follows `python`; a stage whose template writes its command itself has none."""
    inputs: tuple[str, ...] = ()
    """Host files that must be there, which the login node can look for."""
    datasets: tuple[str, ...] = ()
    """Those of `inputs` that are files of datasets."""
    reads: tuple[str, ...] = ()
    """Directories and files besides `inputs`."""
    writes: tuple[str, ...] = ()
    """Directories that the job makes."""
    large: tuple[str, ...] = ()
    """Directories for large files, which the job makes too and stripes over Lustre's storage targets."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name -> text of files that the script writes into the job's directory."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Settings of the stage's script besides those of every stage; templates/README.md documents each."""


class Export(NamedTuple):
    """An environment variable that a stage needs."""

    name: str
    value: str
    why: str
    """The reason, for the reader of the script."""
    origin: str = "hpcgen"
    """The public source of the value."""


class Advice(NamedTuple):
    """A warning about an environment variable that a run file or a cluster profile sets."""

    name: str
    reason: str
    hint: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage(ABC):
    """A kind of job. A subclass says what the job runs; its instances are the stages.

    Methods get the run as it was loaded (`run`) and the run file with absolute paths (`config`).
    """

    name: str
    """Name in commands, template files and logs: nccl-test."""
    order: int
    """Position in the order in which stages are listed and run."""
    summary: str
    """What the job does, for the help of commands and docs/stages.md."""
    settings_doc: str
    """Documentation of the stage's section under `slurm`."""

    is_array: bool = False
    """The job is an array whose tasks share the work on the corpus."""
    uses_gpus: bool = False
    """The job takes every GPU of its nodes, and its tasks are ranks that meet."""
    is_single_task: bool = False
    """The job is one process on one node; for an array, each of its tasks is."""
    shares_node: bool = False
    """Other jobs may run on the job's node."""
    in_container: bool = True
    """The job runs in the container of the run, if there is one."""
    runs_own_files: bool = False
    """The job runs a program that its script carries, instead of Python. The files are written where only the user of
    the job can write."""
    no_kill: bool = False
    """The job goes on when one of its nodes dies."""
    needs_model: bool = True
    """The job needs a run file; otherwise a cluster profile is enough."""
    by_submitit: bool = False
    """`hpcgen submit` can run the stage; all stages can be rendered."""

    frame: str = "base"
    """The template that the stage's own extends: base, or one that extends base."""
    time_limit: str | None = None
    """Default time limit; None requires one from the run file or the cluster profile."""

    trains: bool = False
    """The job is the training itself: warned before its time limit, and its progress is counted in steps."""
    reads_trainer_config: bool = False
    """The job reads the trainer's resolved configuration, so the rules for training are checked."""
    makes_pairs: bool = False
    """The job makes the corpus's .bin/.idx pairs."""

    own_variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that the stage's script computes when the job runs, and how. RUN_DIR stands for the run's directory."""
    config_file: str = ""
    """Name in `Work.files` of the file that `hpcgen submit` passes as --config; empty for none."""
    config_variable: str = ""
    """The one of `own_variables` with the path of that file."""
    stopped_marker: str | None = None
    """File in the run directory by which the job tells that it saved and left early. Its command takes --stop-file."""

    @property
    def section(self) -> str:
        """The stage's key under `slurm`: nccl_test."""
        return self.name.replace("-", "_")

    @property
    def template(self) -> str:
        """The stage's template: slurm/nccl-test.sbatch.j2."""
        return f"slurm/{self.name}.sbatch.j2"

    @property
    def settings(self) -> type[StageSettings]:
        """Class of the stage's section under `slurm`."""
        from hpcgen.config.slurm import ArraySettings, StageSettings

        return ArraySettings if self.is_array else StageSettings

    @property
    def script_variables(self) -> Mapping[str, str]:
        """All variables that the script computes, with the rendezvous of ranks."""
        return {**(RENDEZVOUS | RENDEZVOUS_ID if self.uses_gpus else {}), **self.own_variables}

    @abstractmethod
    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """What the job runs.

        `trainer` is the trainer's resolved configuration. It is None if no planned stage reads it, or if mistakes
        leave it open.

        Raises:
            ConfigErrors: the run file leaves open what to do.
        """

    def problems(self, run: Run, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Mistakes that concern this stage alone."""
        yield from ()

    def warnings(self, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Warnings that concern this stage alone."""
        yield from ()

    def job_name(self, run_name: str) -> str:
        """The job's name in Slurm."""
        return f"{run_name}-{self.name}"

    def cpus_per_task(self, share: int | None) -> int | None:
        """Default for `cpus_per_task`; `share` is an even share of the node's CPUs, None where that is unknown."""
        return share

    def spare_nodes(self, config: RunConfig) -> int:
        """Nodes beyond those that the step runs on."""
        return 0

    def max_tasks(self, config: RunConfig) -> int | None:
        """The number of array tasks that have something to do; None means no limit."""
        return None

    def secrets(self, config: RunConfig) -> tuple[str, ...]:
        """Variables that the job takes from the submitting shell, besides the run's `secrets`."""
        return ()

    def exports(self, run: Run, config: RunConfig) -> Iterator[Export]:
        """Environment variables that the stage itself needs."""
        yield from ()

    def environment_advice(self, run: Run, given: Mapping[str, str]) -> Iterator[Advice]:
        """Warnings about the variables that the user and the site set (`given`)."""
        yield from ()
