"""tensorboard: TensorBoard over the run directory, until the time limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcgen.stages.stage import Stage, Work

if TYPE_CHECKING:
    from hpcgen.config.loader import Run
    from hpcgen.config.run import RunConfig
    from hpcgen.planning.allocation import Allocation
    from trainer.contract.config import TrainerConfig

CPUS = 2
"""One CPU reads event files, one answers."""


class TensorBoard(Stage):
    """TensorBoard on a node that other jobs use too."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """TensorBoard; the script adds the port, which it derives from the job."""
        return Work(
            arguments=("-m", "tensorboard.main", f"--logdir={config.paths.run_dir}/tensorboard"),
            values={"login_host": run.cluster.login_host or "LOGIN_HOST"},
        )

    def cpus_per_task(self, share: int | None) -> int | None:
        """The same few CPUs on every node."""
        return CPUS


STAGES = (
    TensorBoard(
        name="tensorboard",
        order=110,
        summary="serves TensorBoard over the run directory, until the time limit",
        settings_doc="For TensorBoard over the run directory.",
        is_single_task=True,
        shares_node=True,
        needs_model=False,
        time_limit="8:00:00",
    ),
)
