"""Time of the update of the weights, from the gradients that are reduced to the weights that are not gathered yet."""

from __future__ import annotations

from hpcgen.planning.memory.parameters import num_shards, stage_parameter_counts
from hpcgen.planning.step_time.machine import Constant
from hpcgen.planning.step_time.work import Device

OVERHEAD = Constant(
    3e-3, "3 ms per step in which the GPU waits for the host's checks and the update", "guessed"
)
NORM_BYTES = 4
"""Per parameter of a rank's shard: its gradient is read for the norm."""
UPDATE_BYTES = 42
"""Per parameter of a shard: the gradient is scaled and read, the fp32 weight and the moments are read and written, and
the weight of the model is written."""
CLEARED_BYTES = 4
"""Per parameter of the rank: its gradient is cleared for the next step."""
CAST_BYTES = 6
"""Per parameter of a layer in FP8: the weight is cast once per step."""


def optimizer_time(device: Device, stage: int) -> float:
    """Seconds of the update on a device of a pipeline stage."""
    setup, kernels = device.setup, device.kernels
    counts = stage_parameter_counts(setup, stage)
    own = (counts.tables + counts.layers) / num_shards(setup)
    own += counts.experts / num_shards(setup, of_expert=True)
    seconds = OVERHEAD.value + kernels.memory("gradient_norm", "forward", NORM_BYTES * own)
    seconds += kernels.memory("adam", "forward", UPDATE_BYTES * own)
    every = counts.tables + counts.layers + counts.experts
    seconds += kernels.memory("clear", "forward", CLEARED_BYTES * every)
    if setup.training.fp8:
        seconds += kernels.memory("cast_current", "forward", CAST_BYTES * (counts.layers + counts.experts))
    return seconds
