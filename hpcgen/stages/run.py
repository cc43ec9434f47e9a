"""The stage run: starts the user's own training program on every GPU."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.config.loader import Run
from hpcgen.config.program import ProgramConfig, directories
from hpcgen.config.run import RunConfig
from hpcgen.errors import ConfigErrors, Problem
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.deepspeed.file import config_files
from hpcgen.planning.kind import Stage, Work
from hpcgen.planning.node_check import preflight
from hpcgen.planning.notification import notification
from hpcgen.planning.program import (
    SIGNAL_LEAD_S,
    ds_config,
    memory_warnings,
    program_problems,
    progress_warnings,
    task_file,
)
from trainer.contract.config import TrainerConfig


class RunProgram(Stage):
    """Runs the program of the section `program`."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """Runs a shell file, which starts one task of the program."""
        program = config.program
        if program is None or not program.command:
            raise ConfigErrors([])  # `needs` reports it
        lead_s = allocation.settings.signal_lead_s or SIGNAL_LEAD_S
        deepspeed = ds_config(run, config, program, allocation)
        return Work(
            arguments=("sh",),
            writes=directories(program),
            files={
                self.config_file: task_file(run, config, program, allocation),
                **(config_files(deepspeed) if deepspeed else {}),
            },
            values={
                "max_restarts": allocation.max_restarts,
                **({"chain": allocation.settings.chain} if allocation.settings.chain else {}),
                **_settings(program),
                **preflight(run, config, allocation),
                **notification(config, None),
            },
            signal_lead_s=lead_s if program.stop else 0,
        )

    def problems(self, run: Run, config: RunConfig, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields mistakes in the section `program`."""
        if config.program is not None:
            yield from program_problems(self, run, config.program)

    def warnings(self, run: Run, config: RunConfig, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields warnings about progress that does not grow, and about DeepSpeed's estimated memory."""
        if config.program is not None:
            yield from progress_warnings(config.program)
            yield from memory_warnings(self, run, config.program)

    def job_name(self, run_name: str) -> str:
        """The name of the run."""
        return run_name

    def spare_nodes(self, config: RunConfig) -> int:
        """The number of spare nodes that can replace bad ones."""
        return config.preflight.spare_nodes

    def tasks_per_node(self, config: RunConfig, ranks_per_node: int) -> int:
        """One task per rank, or one torchrun per node."""
        return 1 if config.program and config.program.launcher == "torchrun" else ranks_per_node


def _settings(program: ProgramConfig) -> dict[str, object]:
    """Settings for templates/lib/run.sh."""
    progress = vars(program.progress) if program.progress else {}
    kind, pattern = next(((key, value) for key, value in progress.items() if value is not None), ("", ""))
    return {
        "progress_kind": kind,
        "progress_pattern": pattern,
        "stop_signal": (program.stop and program.stop.signal) or "",
        "stop_path": (program.stop and program.stop.file) or "",
        "done_file": program.done.file if program.done else "",
    }


RUN = RunProgram.of("run")
STAGES = (RUN,)
