"""The stage tensorboard: serves TensorBoard for the run directory until the time limit."""

from __future__ import annotations

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.kind import Stage, Work
from trainer.contract.config import TrainerConfig

CPUS = 2
"""One CPU to read event files and one to serve requests."""


class TensorBoard(Stage):
    """Runs TensorBoard on a node shared with other jobs."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """Runs TensorBoard. The script adds the port, which it derives from the job ID."""
        return Work(
            arguments=("-m", "tensorboard.main", f"--logdir={config.paths.run_dir}/tensorboard"),
            values={"login_host": run.cluster.login_host or "LOGIN_HOST"},
        )

    def cpus_per_task(self, share: int | None) -> int | None:
        """CPUS, whatever the size of the node."""
        return CPUS


STAGES = (TensorBoard.of("tensorboard"),)
