"""The process groups of the layout."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import distributed_c10d

from trainer.contract.config import TrainerConfig
from trainer.contract.errors import LostPeersError, TrainerError
from trainer.distributed.rendezvous import Ranks, open_store, take_gpu

T = TypeVar("T")

SECOND_LINE_S = 60
"""How much longer than `trainer.faults.watch`, which leaves stacks, the process groups themselves wait (seconds)."""

GLOO_ERRORS = ("gloo/transport", "gloo::", "[Gloo]")
"""Gloo raises a plain RuntimeError, whose text has one of these."""


def initialize(config: TrainerConfig, ranks: Ranks, environ: Mapping[str, str]) -> ProcessGroupCollection:
    """Joins the ranks and builds the process groups of the layout.

    Raises:
        TrainerError: the ranks are not those the layout was planned for, or no address was given to meet at.
        LostPeersError: not all of them came.
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
    with lost_peers_named(ranks, lambda: "while the ranks met"):
        torch.distributed.init_process_group(
            backend="nccl" if config.device == "cuda" else "gloo",
            store=open_store(ranks, environ, timeout),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout + datetime.timedelta(seconds=SECOND_LINE_S),
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor_model_parallel_size,
            pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
            context_parallel_size=layout.context_parallel_size,
            distributed_timeout_minutes=config.training.distributed_timeout_minutes + SECOND_LINE_S // 60,
            create_gloo_process_groups=False,
            use_sharp=layout.use_sharp,
        )
    return ProcessGroupCollection.use_mpu_process_groups()


def from_rank_0(function: Callable[[], T]) -> T:
    """Calls `function` on rank 0 alone; returns its result, or raises its error, on every rank.

    Whatever the error is, it then has `is_everywhere` set, as a TrainerError has it.
    """
    box: list[tuple[T | None, Exception | None]] = [(None, None)]
    if torch.distributed.get_rank() == 0:
        try:
            box = [(function(), None)]
        except Exception as error:  # whatever it is, the others wait for the answer
            error.is_everywhere = True
            box = [(None, error)]
    torch.distributed.broadcast_object_list(box, src=0)
    result, error = box[0]
    if error is not None:
        raise error
    return result


def limit_waits(seconds: float) -> None:
    """From here on a collective of any group that waits longer than `seconds`, and some more, fails."""
    timeout = datetime.timedelta(seconds=seconds + SECOND_LINE_S)
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timeout, group)


@contextlib.contextmanager
def lost_peers_named(ranks: Ranks, where: Callable[[], str]) -> Iterator[None]:
    """Makes one line of what gloo, NCCL or the store raise when another rank is gone; `where` says how far we came.

    Raises:
        LostPeersError: in place of their error.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_of_transport(error):
            raise
        reason = str(error).strip().splitlines()[0].split(". This is typically")[0]
        raise LostPeersError(
            f"{ranks.name} lost its peers {where()} ({reason}); the first rank to end says why"
        ) from error


def _is_of_transport(error: RuntimeError) -> bool:
    return isinstance(error, torch.distributed.DistError) or any(name in str(error) for name in GLOO_ERRORS)


def finalize() -> None:
    """Waits for all ranks, so that none tears down a connection another still uses, and leaves."""
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
