"""The process groups of the layout."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.config import TrainerConfig
from trainer.errors import TrainerError
from trainer.rendezvous import Ranks, open_store, take_gpu

T = TypeVar("T")


def initialize(config: TrainerConfig, ranks: Ranks, environ: Mapping[str, str]) -> ProcessGroupCollection:
    """Joins the ranks and builds the process groups of the layout.

    Raises:
        TrainerError: the ranks are not those the layout was planned for, or no address was given to meet at.
    """
    layout = config.parallelism
    if ranks.world_size != config.world_size:
        raise TrainerError(
            f"{ranks}: the layout was planned for world_size = {config.world_size}; "
            "launch as many tasks, or plan the layout again"
        )
    if config.device == "cuda":
        take_gpu(ranks)
    timeout = datetime.timedelta(minutes=config.training.distributed_timeout_minutes)
    torch.distributed.init_process_group(
        backend="nccl" if config.device == "cuda" else "gloo",
        store=open_store(ranks, environ, timeout),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        distributed_timeout_minutes=config.training.distributed_timeout_minutes,
        create_gloo_process_groups=False,
        use_sharp=layout.use_sharp,
    )
    return ProcessGroupCollection.use_mpu_process_groups()


def from_rank_0(function: Callable[[], T]) -> T:
    """Calls `function` on rank 0 alone; returns its result, or raises its error, on every rank."""
    box: list[tuple[T | None, Exception | None]] = [(None, None)]
    if torch.distributed.get_rank() == 0:
        try:
            box = [(function(), None)]
        except Exception as error:  # whatever it is, the others wait for the answer
            box = [(None, error)]
    torch.distributed.broadcast_object_list(box, src=0)
    result, error = box[0]
    if error is not None:
        raise error
    return result


def finalize() -> None:
    """Waits for all ranks, so that none tears down a connection another still uses, and leaves."""
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
