"""Memory estimate of a device, term by term.

| term | module |
| --- | --- |
| weights, gradients and optimizer state | `parameters` |
| activations that a layer keeps for the backward pass, and what exists only while it is computed | `attention`, `mlp` |
| adapters, and what frozen linear layers do not keep | `adapters` |
| logits and MTP layers | `output` |
| microbatches in flight on a pipeline stage, and moments at which the most memory is in use | `stages` |
| buffers that libraries keep for their kernels | `kernels` |
| what no tensor takes: CUDA, fragments and NCCL's buffers | `other` |

Sizes of activations are bytes per token on a device, unless the name says otherwise.
"""

from hpcgen.planning.memory.other import OTHER_GIB, nccl_gib
from hpcgen.planning.memory.parameters import bytes_per_parameter
from hpcgen.planning.memory.stages import GIB, MemoryEstimate, estimate_memory, estimate_stage

__all__ = [
    "GIB",
    "OTHER_GIB",
    "MemoryEstimate",
    "bytes_per_parameter",
    "estimate_memory",
    "estimate_stage",
    "nccl_gib",
]
