"""Process groups of the layout."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import distributed_c10d

from trainer.contract.config import ParallelismConfig, TrainerConfig
from trainer.contract.errors import LostPeersError, ReportedByRank0Error, TrainerError
from trainer.contract.model import pipeline
from trainer.distributed.rendezvous import Ranks, open_store, select_gpu

T = TypeVar("T")

GROUP_TIMEOUT_MARGIN_S = 60
"""Seconds added to the timeout of process groups, so that `trainer.faults.watch` times out first and writes reports."""

GLOO_ERRORS = ("gloo/transport", "gloo::", "[Gloo]")
"""Texts that identify the plain RuntimeErrors that gloo raises."""


def initialize(config: TrainerConfig, ranks: Ranks, environ: Mapping[str, str]) -> ProcessGroupCollection:
    """Connect the ranks of a training run and build the process groups of its layout.

    Raises:
        TrainerError: see `connect`.
        LostPeersError: not all ranks connected.
    """
    return connect(
        config.parallelism,
        ranks,
        environ,
        world_size=config.world_size,
        device=config.device,
        timeout_minutes=config.training.distributed_timeout_minutes,
        embedding_stages=pipeline.embedding_stages(config.model, config.parallelism),
    )


def connect(
    layout: ParallelismConfig,
    ranks: Ranks,
    environ: Mapping[str, str],
    *,
    world_size: int,
    device: str,
    timeout_minutes: int,
    embedding_stages: Sequence[int] = (0, -1),
) -> ProcessGroupCollection:
    """Connect `world_size` ranks and build the process groups of a layout.

    Raises:
        TrainerError: the ranks do not match the planned layout, or MASTER_ADDR or MASTER_PORT is not set.
        LostPeersError: not all ranks connected.
    """
    if ranks.world_size != world_size:
        raise TrainerError(
            f"the layout was planned for world_size = {world_size}. "
            "Launch this number of tasks, or plan the layout again",
            where=ranks,
        )
    if device == "cuda":
        select_gpu(ranks)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    with reporting_lost_peers(ranks, lambda: "while the ranks met"):
        torch.distributed.init_process_group(
            backend="nccl" if device == "cuda" else "gloo",
            store=open_store(ranks, environ, timeout),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout + datetime.timedelta(seconds=GROUP_TIMEOUT_MARGIN_S),
        )
        return build(layout, timeout_minutes=timeout_minutes, embedding_stages=embedding_stages)


def build(
    layout: ParallelismConfig, *, timeout_minutes: int, embedding_stages: Sequence[int] = (0, -1)
) -> ProcessGroupCollection:
    """Build the process groups of a layout. Every rank of the default group must call this.

    `embedding_stages` are the pipeline stages that may have a copy of the embedding.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        hierarchical_context_parallel_sizes=list(layout.hierarchical_context_parallel_sizes or ()),
        num_distributed_optimizer_instances=layout.num_distributed_optimizer_instances,
        distributed_timeout_minutes=timeout_minutes + GROUP_TIMEOUT_MARGIN_S // 60,
        create_gloo_process_groups=False,
        get_embedding_ranks=lambda ranks: sorted({ranks[stage] for stage in embedding_stages}),
        use_sharp=layout.use_sharp,
    )
    return ProcessGroupCollection.use_mpu_process_groups()


def this_rank() -> str:
    """This rank and its host, for messages of a process that has joined the group."""
    return f"rank {torch.distributed.get_rank()} on {socket.gethostname()}"


def from_last_stage(values: torch.Tensor, groups: ProcessGroupCollection) -> torch.Tensor:
    """The `values` of the ranks of the last pipeline stage, on every rank of the replica, which all pass one shape."""
    group = groups.mp
    if group.size() > 1:
        # The last rank of the group is always in the last pipeline stage.
        source = torch.distributed.get_global_rank(group, group.size() - 1)
        torch.distributed.broadcast(values, source, group=group)
    return values


def gathered(own: Sequence[tuple[int, T]]) -> list[tuple[int, T]]:
    """The numbered values of all ranks in the order of their numbers, on rank 0; elsewhere none."""
    is_first = torch.distributed.get_rank() == 0
    parts: list[Sequence[tuple[int, T]]] = [()] * torch.distributed.get_world_size()
    torch.distributed.gather_object(own, parts if is_first else None)
    return sorted(itertools.chain.from_iterable(parts), key=lambda each: each[0])


def from_rank_0(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 only, and return its result or raise its error on every rank.

    Raises:
        TrainerError: on all ranks, if `function` raises one.
        ReportedByRank0Error: on the other ranks, if `function` raises any other error.
    """
    box: list[tuple[T | None, TrainerError | ReportedByRank0Error | None]] = [(None, None)]
    unexpected = None
    if torch.distributed.get_rank() == 0:
        try:
            box = [(function(), None)]
        except TrainerError as error:
            box = [(None, error.on_all_ranks())]
        except Exception as error:  # the other ranks wait for an answer in any case
            unexpected = error
            box = [(None, ReportedByRank0Error(f"{type(error).__name__}: {error}"))]
    torch.distributed.broadcast_object_list(box, src=0)
    if unexpected is not None:
        raise unexpected
    result, raised = box[0]
    if raised is not None:
        raise raised
    return cast(T, result)  # None only if that is what `function` returned


def set_group_timeouts(seconds: float) -> None:
    """Set the timeout of all process groups to `seconds` plus a margin, from now on."""
    timeout = datetime.timedelta(seconds=seconds + GROUP_TIMEOUT_MARGIN_S)
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timeout, group)


@contextlib.contextmanager
def reporting_lost_peers(ranks: Ranks, where: Callable[[], str]) -> Iterator[None]:
    """Convert errors of gloo, NCCL and the store about a lost rank to one line. `where` returns the current progress.

    Raises:
        LostPeersError: instead of their error.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_transport_error(error):
            raise
        reason = str(error).strip().splitlines()[0].split(". This is typically")[0]
        raise LostPeersError(
            f"{ranks.name} lost its peers {where()} ({reason}). See the log line of the rank that ended first"
        ) from error


def is_transport_error(error: RuntimeError) -> bool:
    """True if a connection between ranks failed: an error of gloo, NCCL or the store."""
    return isinstance(error, torch.distributed.DistError) or any(name in str(error) for name in GLOO_ERRORS)


def finalize() -> None:
    """Wait for all ranks, so that no connection is closed while in use, and destroy the process groups."""
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
