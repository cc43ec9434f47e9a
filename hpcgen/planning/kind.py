"""The class Stage: a kind of job, with everything that a plan and a script need to know about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, NamedTuple, TypeVar

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.config.stages import STAGE_ROWS, StageRow
from hpcgen.errors import Problem
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.inputs import Input
from trainer.contract.config import TrainerConfig
from trainer.contract.record import record

StageT = TypeVar("StageT", bound="Stage")


@record(kw_only=True)
class Work:
    """The command of a stage, and the host paths that it uses."""

    arguments: tuple[str, ...] = ()
    """Arguments after `python`. Empty if the stage's template contains the command."""
    inputs: tuple[Input, ...] = ()
    """Host files that must exist."""
    reads: tuple[str, ...] = ()
    """Directories and files read in addition to `inputs`."""
    writes: tuple[str, ...] = ()
    """Directories that the job creates."""
    large: tuple[str, ...] = ()
    """Directories for large files. The job creates them and stripes them over Lustre's storage targets."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name -> content of files that the script writes into the job's directory."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Settings of the stage's script in addition to the settings that all stages have. Documented in
    templates/README.md."""
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


ONE_THREAD = Export(
    "OMP_NUM_THREADS",
    "1",
    "One OpenMP thread per rank; more would compete with the rank's other threads and processes.",
)


@record(kw_only=True, eq=False)
class Stage(StageRow, ABC):
    """A kind of job: its row, and what the job does. Subclasses define it; their instances are the stages.

    Methods receive the run as loaded (`run`) and the run file with absolute paths (`config`).
    """

    @classmethod
    def of(cls: type[StageT], name: str, **more: Any) -> StageT:
        """The stage with this row of hpcgen.config.stages. `more`: fields that only its class has."""
        return cls(**vars(STAGE_ROWS[name]), **more)

    @property
    def environment_of(self) -> str:
        """Name of the stage whose variables in the node type this stage uses."""
        return self.name

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

    def problems(self, run: Run, config: RunConfig, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields mistakes specific to this stage."""
        yield from ()

    def warnings(self, run: Run, config: RunConfig, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields warnings specific to this stage."""
        yield from ()

    def packages(self, config: RunConfig) -> dict[str, str]:
        """Modules that the job imports in addition to the trainer's, with the key that needs them."""
        return {}

    def queued_stage(self, config: RunConfig) -> Stage | None:
        """Stage that the running job submits, as train submits evaluate. Its script is embedded in the job."""
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
        """The number of spare nodes, in addition to the nodes that the step runs on."""
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

    def environment_advice(self, run: Run, given: Mapping[str, str]) -> Iterator[Problem]:
        """Yields warnings about the variables that the user and the site set (`given`)."""
        yield from ()
