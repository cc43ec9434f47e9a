"""The class Stage: a kind of job, with everything that the rest of hpcgen needs to know about it."""

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
    "MASTER_ADDR": "address of the step's first node, as reported by scontrol",
    "MASTER_PORT": "10000 to 29999, from the job ID, restart count and step count; a later port if it is in use",
    "WORLD_SIZE": "number of ranks in the step",
}
"""Variables for the rendezvous of ranks, and how the script of every stage with ranks computes them."""

RENDEZVOUS_ID = {
    "TRAINER_RENDEZVOUS_ID": "random for each attempt; identifies the ranks of a job if MASTER_PORT is already in use"
}
"""Computed together with RENDEZVOUS."""

TRAINING = dict.fromkeys(("model", "training", "optimizer"), "add it, or a preset (see hpcgen presets)")
"""The needs of stages that read the trainer's configuration."""

TRAINER_FILE = "trainer.json"
TRAINER_CONFIG = {"TRAINER_CONFIG": f"RUN_DIR/jobs/JOBID/{TRAINER_FILE}"}


@dataclass(frozen=True, kw_only=True)
class Work:
    """The command of a stage, and the host paths that it uses."""

    arguments: tuple[str, ...] = ()
    """Arguments after `python`. Empty if the stage's template contains the command."""
    inputs: tuple[str, ...] = ()
    """Host files that must exist. They can be checked on the login node."""
    datasets: tuple[str, ...] = ()
    """Members of `inputs` that are dataset files."""
    reads: tuple[str, ...] = ()
    """Directories and files read in addition to `inputs`."""
    writes: tuple[str, ...] = ()
    """Directories that the job creates."""
    large: tuple[str, ...] = ()
    """Directories for large files. The job creates them and stripes them over Lustre's storage targets."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name -> content of files that the script writes into the job's directory."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Settings of the stage's script in addition to those of all stages. Documented in templates/README.md."""
    signal_lead_s: int = 0
    """Seconds before the time limit at which the job receives its signal; 0 for none."""


class Export(NamedTuple):
    """An environment variable that a stage needs."""

    name: str
    value: str
    why: str
    """The reason, for the reader of the script."""
    origin: str = "hpcgen"
    """Public source of the value."""


class Advice(NamedTuple):
    """A warning about an environment variable that a run file or a cluster profile sets."""

    name: str
    reason: str
    hint: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage(ABC):
    """A kind of job. Subclasses define what the job runs; their instances are the stages.

    Methods receive the run as loaded (`run`) and the run file with absolute paths (`config`).
    """

    name: str
    """Name in commands, template files and logs, such as nccl-test."""
    order: int
    """Sort key for the order in which stages are listed and run."""
    summary: str
    """One-line description, as shown by the help of commands and in docs/stages.md."""
    settings_doc: str
    """Documentation of the stage's section under `slurm`."""
    other_names: tuple[str, ...] = ()
    """Words that users of other programs type for this kind of job. Errors answer them with `name`."""

    is_array: bool = False
    """The job is an array whose tasks share the work on the corpus."""
    uses_gpus: bool = False
    """The job uses all GPUs of its nodes. Unless it is a single task, its tasks are ranks with a rendezvous."""
    is_single_task: bool = False
    """The job, or each task of an array, is one process on one node."""
    one_node_by_default: bool = False
    """The job runs on one node unless the stage's own section sets `nodes`."""
    shares_node: bool = False
    """Other jobs may run on the job's node."""
    in_container: bool = True
    """The job runs in the container of the run, if there is one."""
    runs_own_files: bool = False
    """The job runs a program contained in its script, in place of Python. The script writes the files to a directory
    that only the job's user can write to."""
    runs_user_program: bool = False
    """The job runs a program of the user, in place of Python with hpcgen's code."""
    no_kill: bool = False
    """The job continues when one of its nodes fails."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Keys of the run file that the job needs, and what to do if one is missing. Without any, a cluster profile is
    enough."""
    by_submitit: bool = False
    """`hpcgen submit` can run the stage. All stages can be rendered."""

    frame: str = "base"
    """Template that the stage's template extends: base, or one that extends base."""
    time_limit: str | None = None
    """Default time limit. None requires one in the run file or the cluster profile."""

    trains: bool = False
    """The job is hpcgen's training. Its progress is counted in steps."""
    has_attempts: bool = False
    """The job requeues itself as long as it makes progress, and can check its nodes before each attempt."""
    reads_trainer_config: bool = False
    """The job reads the trainer's resolved configuration, so the rules for training are checked."""
    makes_pairs: bool = False
    """The job produces the corpus's .bin/.idx pairs."""
    uses_tokenizer: bool = False
    """The job uses the tokenizer with the trained model, so it must be the one that made the training pairs."""

    own_variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that the stage's script computes when the job runs, with a description. RUN_DIR stands for the run
    directory."""
    config_file: str = ""
    """Name in `Work.files` of the file that configures a task. Python gets it as --config. Empty for none."""
    config_variable: str = ""
    """Name in `own_variables` of the variable with the path of `config_file`."""
    stopped_marker: str | None = None
    """File in the run directory that shows that the job saved and stopped early. The command accepts --stop-file."""

    @property
    def section(self) -> str:
        """The stage's key under `slurm`, such as nccl_test."""
        return self.name.replace("-", "_")

    @property
    def template(self) -> str:
        """The stage's template, such as slurm/nccl-test.sbatch.j2."""
        return f"slurm/{self.name}.sbatch.j2"

    @property
    def settings(self) -> type[StageSettings]:
        """The class of the stage's section under `slurm`."""
        from hpcgen.config.slurm import ArraySettings, StageSettings

        return ArraySettings if self.is_array else StageSettings

    @property
    def has_ranks(self) -> bool:
        """The job's tasks are ranks with a rendezvous."""
        return self.uses_gpus and not self.is_single_task

    @property
    def environment_of(self) -> str:
        """Name of the stage whose variables the node type sets for this one."""
        return self.name

    @property
    def script_variables(self) -> Mapping[str, str]:
        """All variables that the script computes, including those for the rendezvous."""
        return {**(RENDEZVOUS | RENDEZVOUS_ID if self.has_ranks else {}), **self.own_variables}

    @abstractmethod
    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """Returns what the job runs.

        `trainer` is the trainer's resolved configuration. It is None if no planned stage reads it, or if mistakes
        prevent its resolution.

        Raises:
            ConfigErrors: settings for the stage are missing or conflict.
        """

    def problems(self, run: Run, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields mistakes specific to this stage."""
        yield from ()

    def warnings(self, run: Run, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields warnings specific to this stage."""
        yield from ()

    def packages(self, config: RunConfig) -> dict[str, str]:
        """Modules that the job imports in addition to those of the trainer, with the key that needs them."""
        return {}

    def queued_stage(self, config: RunConfig) -> Stage | None:
        """The stage whose jobs this stage's job queues while it runs. Its script is one of the job's files."""
        return None

    def results(self, config: RunConfig) -> str:
        """Path of the job's results. Empty if there is none to point to."""
        return ""

    def job_name(self, run_name: str) -> str:
        """The job's name in Slurm."""
        return f"{run_name}-{self.name}"

    def cpus_per_task(self, share: int | None) -> int | None:
        """The default for `cpus_per_task`. `share` is an equal share of the node's CPUs, or None if unknown."""
        return share

    def spare_nodes(self, config: RunConfig) -> int:
        """The number of spare nodes, in addition to those that the step runs on."""
        return 0

    def tasks_per_node(self, config: RunConfig, ranks_per_node: int) -> int:
        """The number of tasks on each node, for a stage with ranks. One task can start several ranks."""
        return ranks_per_node

    def max_tasks(self, config: RunConfig) -> int | None:
        """The maximum useful number of array tasks; None for no limit."""
        return None

    def secrets(self, config: RunConfig) -> tuple[str, ...]:
        """Variables that the job inherits from the submitting shell, in addition to the run's `secrets`."""
        return ()

    def exports(self, run: Run, config: RunConfig) -> Iterator[Export]:
        """Yields the environment variables that the stage itself needs."""
        yield from ()

    def environment_advice(self, run: Run, given: Mapping[str, str]) -> Iterator[Advice]:
        """Yields warnings about the variables that the user and the site set (`given`)."""
        yield from ()
