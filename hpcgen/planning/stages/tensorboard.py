"""The tensorboard stage: TensorBoard over the run directory, until the time limit."""

from __future__ import annotations

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.stages.work import Work


def work(run: Run, config: RunConfig, allocation: Allocation) -> Work:
    """What the tensorboard stage runs; the script adds the port, which it takes from the job."""
    return Work(
        arguments=("-m", "tensorboard.main", f"--logdir={config.paths.run_dir}/tensorboard"),
        values={"login_host": run.cluster.login_host or "LOGIN_HOST"},
    )
