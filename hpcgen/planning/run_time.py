"""How long a run takes and what it uses: jobs, GPU-hours and energy, from the time of its steps."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainer.contract.config import TrainingConfig
from trainer.contract.model.batch_size import Batches
from trainer.contract.record import record

NODE_WATTS = 2500.0
"""Power of a node with eight GPUs under load, without its GPUs: CPUs, memory, NICs, fans and power supplies."""
NODE_WATTS_SOURCE = (
    "guessed: about half of the 4.6 kW that a DGX H100 may use besides its GPUs, by its data sheet"
)


@record
class Steps:
    """Consecutive optimizer steps with the same batch size."""

    count: int
    batch_size: int
    """Samples of a step."""


def remaining_steps(training: TrainingConfig, iteration: int, consumed_samples: int) -> Iterator[Steps]:
    """Yields the steps after `iteration`, which have read `consumed_samples`, by batch size in ascending order."""
    count, size, left = 0, training.global_batch_size, training.train_iters - iteration
    if training.rampup_batch_size is not None:
        for batch in Batches(training, iteration, consumed_samples):
            if count and batch.size != size:
                yield Steps(count, size)
                left, count = left - count, 0
            size = batch.size
            if size == training.global_batch_size:
                break
            count += 1
    if left > 0:
        yield Steps(left, size)


@record(kw_only=True)
class Job:
    """Times of each job of a run in seconds."""

    limit_s: int
    """Time limit; 0 if there is none."""
    startup_s: float
    """From the start of the job to its first step."""
    lead_s: float
    """From the signal that asks to stop to the time limit."""
    last_save_s: float
    """The save at the end, which training waits for."""

    @property
    def training_s(self) -> float:
        """Time between start-up and signal."""
        return self.limit_s - self.startup_s - self.lead_s if self.limit_s else math.inf

    def count(self, work_s: float) -> int:
        """Number of jobs that train for `work_s` together. `training_s` must be positive."""
        return max(1, math.ceil(work_s / self.training_s))


@record(kw_only=True)
class Resources:
    """Resources that a job allocates and uses."""

    num_nodes: int
    """Nodes of a job, with spare ones."""
    num_gpus: int
    """GPUs of these nodes."""
    gpu_watts: float
    """Power of a GPU under load."""

    @property
    def node_watts(self) -> float:
        """Power of a node without its GPUs, in proportion to its GPUs."""
        return NODE_WATTS * self.num_gpus / self.num_nodes / 8

    @property
    def kilowatts(self) -> float:
        """Power of a job under load."""
        return (self.num_gpus * self.gpu_watts + self.num_nodes * self.node_watts) / 1000


@record(kw_only=True)
class RunTime:
    """Time of the rest of a run in seconds, and what it uses."""

    steps_s: float
    evaluation_s: float
    saves_and_failures_s: float
    """Time lost to saves, and to failures with the steps that are repeated after them."""
    num_jobs: int
    """Number of jobs of the time limit's length."""
    job_overhead_s: float
    """Start-up and last save of all jobs."""
    resources: Resources

    @property
    def total_s(self) -> float:
        """Time in jobs, without the time that they wait in the queue."""
        return self.steps_s + self.evaluation_s + self.saves_and_failures_s + self.job_overhead_s

    @property
    def gpu_hours(self) -> float:
        """GPU-hours that are charged: those of all allocated GPUs, for all time in jobs."""
        return self.resources.num_gpus * self.total_s / 3600

    @property
    def energy_kwh(self) -> float:
        """Energy of the nodes, without cooling and switches."""
        return self.resources.kilowatts * self.total_s / 3600


def run_time(steps_s: float, evaluation_s: float, lost: float, job: Job, resources: Resources) -> RunTime:
    """The time of steps and evaluations that take so long without interruptions.

    `lost` is the part of the time that is lost to saves and failures, less than 1.
    """
    saves_and_failures_s = (steps_s + evaluation_s) * lost / (1 - lost)
    num_jobs = job.count(steps_s + evaluation_s + saves_and_failures_s)
    return RunTime(
        steps_s=steps_s,
        evaluation_s=evaluation_s,
        saves_and_failures_s=saves_and_failures_s,
        num_jobs=num_jobs,
        job_overhead_s=num_jobs * (job.startup_s + job.last_save_s),
        resources=resources,
    )
