"""The stage run: starts the user's own training program on every GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcgen.stages.stage import Stage, Work

if TYPE_CHECKING:
    from hpcgen.config.loader import Run
    from hpcgen.config.program import ProgramConfig
    from hpcgen.config.run import RunConfig
    from hpcgen.errors import Problem
    from hpcgen.planning.allocation import Allocation
    from trainer.contract.config import TrainerConfig

SIGNAL_LEAD_S = 300
"""Default time that a program has to save and stop."""


class RunProgram(Stage):
    """Runs the program of the section `program`."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """Runs a shell file, which starts one task of the program."""
        from hpcgen.config.program import directories
        from hpcgen.errors import ConfigErrors
        from hpcgen.planning.deepspeed.file import config_files
        from hpcgen.planning.node_check import preflight
        from hpcgen.planning.program import ds_config, task_file

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
                **_settings(program),
                **preflight(run, config, allocation),
            },
            signal_lead_s=lead_s if program.stop else 0,
        )

    def problems(self, run: Run, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields mistakes in the section `program`."""
        from hpcgen.planning.program import program_problems

        if run.config.program is not None:
            yield from program_problems(self, run, run.config.program)

    def warnings(self, run: Run, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields a warning if DeepSpeed's estimated memory does not fit the nodes."""
        from hpcgen.planning.program import memory_warnings

        if run.config.program is not None:
            yield from memory_warnings(self, run, run.config.program)

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


RUN = RunProgram(
    name="run",
    order=82,
    summary="runs a training program of your own",
    settings_doc="Resources for a training program of your own.",
    uses_gpus=True,
    runs_user_program=True,
    needs={"program": "set at least program.command"},
    by_submitit=True,
    has_attempts=True,
    config_file="program.sh",
)
STAGES = (RUN,)
