"""A predicted step: its time, where the time goes, and what the prediction does not know."""

from __future__ import annotations

from hpcgen.planning.step_time.pipeline import Timeline
from trainer.contract.record import record


@record
class StageTime:
    """Seconds that the devices of one pipeline stage work on one microbatch, in all its model chunks."""

    forward: float
    backward: float
    """Backward pass, with recomputation."""


@record
class StepTime:
    """Time of one optimizer step in seconds, of which every part is on the critical path.

    The parts add up to `total`.
    """

    compute: float
    """Forward and backward passes of the slowest stage, without the communication that they wait for."""
    host: float
    """Time in which GPUs wait for the host to launch kernels."""
    tensor_parallel: float
    """Transfers of tensor parallelism that no computation hides. The next three likewise."""
    context_parallel: float
    expert_parallel: float
    data_parallel: float
    """Reduction of gradients and gathering of weights."""
    pipeline_bubble: float
    """Time in which the slowest stage waits for other stages."""
    pipeline_transfers: float
    """Sending of hidden states and gradients between stages."""
    optimizer: float
    stages: tuple[StageTime, ...]
    """The pipeline stages in order."""
    guesses: tuple[str, ...]
    """Constants that the prediction uses and that were not measured on this GPU or fabric, each as a line for people
    with its value."""
    host_is_measured: bool = False
    """True if the time to launch its layers was measured on the cluster."""

    @property
    def total(self) -> float:
        """Time of the step in seconds."""
        transfers = self.tensor_parallel + self.context_parallel + self.expert_parallel + self.data_parallel
        pipeline = self.pipeline_bubble + self.pipeline_transfers
        return self.compute + self.host + transfers + pipeline + self.optimizer


@record
class Schedule:
    """Work of the stages of a pipeline in a step, in order. Times are seconds that nothing hides."""

    gather: float
    """Waiting for weights, before the first pass."""
    passes: Timeline
    """Forward and backward passes, from the end of `gather`."""
    reduction: float
    """From the last backward pass until all gradients are reduced."""
    optimizer: tuple[float, ...]
    """Update of the weights, by stage."""

    @property
    def total(self) -> float:
        """Time of the step."""
        return self.gather + self.passes.total + self.reduction + max(self.optimizer)
