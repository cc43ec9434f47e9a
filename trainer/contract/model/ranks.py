"""Numbers of ranks that a layout needs (megatron/core/parallel_state.py, initialize_model_parallel)."""

from __future__ import annotations

import math

from trainer.contract.config import ParallelismConfig
from trainer.contract.model.experts import expert_tensor_parallel_size


def model_parallel_size(parallelism: ParallelismConfig) -> int:
    """Number of ranks per model replica: TP x PP x CP."""
    return (
        parallelism.tensor_model_parallel_size
        * parallelism.pipeline_model_parallel_size
        * parallelism.context_parallel_size
    )


def expert_parallel_size(parallelism: ParallelismConfig) -> int:
    """Number of ranks that together hold all experts once: ETP x EP x PP."""
    return (
        expert_tensor_parallel_size(parallelism)
        * parallelism.expert_model_parallel_size
        * parallelism.pipeline_model_parallel_size
    )


def fewest_ranks(parallelism: ParallelismConfig) -> int:
    """The smallest world size that TP x PP x CP and ETP x EP x PP both divide."""
    return math.lcm(model_parallel_size(parallelism), expert_parallel_size(parallelism))
