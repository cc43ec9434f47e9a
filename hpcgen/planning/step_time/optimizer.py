"""Time to update the weights, after the gradients are reduced and before the weights are gathered."""

from __future__ import annotations

from hpcgen.planning.memory.parameters import num_shards, trained_parameter_counts
from hpcgen.planning.step_time.linear import CASTS
from hpcgen.planning.step_time.machine import Constant
from hpcgen.planning.step_time.work import Device

OVERHEAD = Constant(
    3e-3, "3 ms per step in which the GPU waits for the host's checks and the update", "guessed"
)
UPDATE = {"gradient_norm": 4, "scale_gradients": 8, "adam": 28, "copy_parameters": 6}
"""Kernels of the update, and the bytes that they move per parameter of a rank's shard."""
CLEARED_BYTES = 4
"""Per parameter of the rank: its gradient is cleared for the next step."""


def optimizer_time(device: Device, stage: int) -> float:
    """Seconds of the update on a device of a pipeline stage."""
    setup, kernels = device.setup, device.kernels
    counts = trained_parameter_counts(setup)[stage]
    own = (counts.tables + counts.layers) / num_shards(setup)
    own += counts.experts / num_shards(setup, of_expert=True)
    seconds = OVERHEAD.value
    seconds += sum(kernels.memory(kernel, "forward", size * own) for kernel, size in UPDATE.items())
    weights = counts.layers + counts.experts
    seconds += kernels.memory("zero_gradients", "forward", CLEARED_BYTES * (counts.tables + weights))
    if setup.training.fp8:  # once per step, for all microbatches
        kernel, size = CASTS[setup.training.fp8_recipe]
        seconds += kernels.memory(kernel, "forward", size * weights)
    return seconds
