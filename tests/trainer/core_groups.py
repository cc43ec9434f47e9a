"""Megatron-Core's groups of a layout, in the test's own process, with collectives that do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.contract.config import ParallelismConfig


@contextmanager
def core_groups(axes: ParallelismConfig, world_size: int) -> Iterator[None]:
    """Makes the groups of rank 0.

    Raises:
        Exception: Megatron-Core refuses the layout.
    """
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=axes.tensor_model_parallel_size,
            pipeline_model_parallel_size=axes.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=axes.virtual_pipeline_model_parallel_size,
            context_parallel_size=axes.context_parallel_size,
            hierarchical_context_parallel_sizes=list(axes.hierarchical_context_parallel_sizes or ()) or None,
            expert_model_parallel_size=axes.expert_model_parallel_size,
            expert_tensor_parallel_size=axes.expert_tensor_parallel_size,
            num_distributed_optimizer_instances=axes.num_distributed_optimizer_instances,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
