"""Who this process is among the ranks, and the process groups of the layout."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.config import TrainerConfig
from trainer.errors import TrainerError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process's place, and what told us."""

    rank: int
    local_rank: int
    world_size: int
    source: str

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {socket.gethostname()} (from {self.source})"


def find_ranks(environ: Mapping[str, str]) -> Ranks:
    """Reads who launched this process from its environment.

    In this order: torchrun; a launcher that set RANK, WORLD_SIZE and LOCAL_RANK (submitit's wrapper); srun;
    and else one plain process. The shell of a batch script has SLURM_PROCID=0 and the job's SLURM_NTASKS too:
    only a step started by srun has SLURM_STEP_ID. pyxis sets RANK and LOCAL_RANK without WORLD_SIZE.

    Raises:
        TrainerError: a variable is not a number.
    """
    launcher_names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" in environ:
        return _ranks(environ, launcher_names, "torchrun")
    if all(name in environ for name in launcher_names):
        return _ranks(environ, launcher_names, "RANK, LOCAL_RANK, WORLD_SIZE")
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        # In `srun -n 1` inside a job of 16 tasks, SLURM_NTASKS may be the job's.
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        return _ranks(environ, ("SLURM_PROCID", "SLURM_LOCALID", size), "srun")
    return Ranks(rank=0, local_rank=0, world_size=1, source="no launcher")


def _ranks(environ: Mapping[str, str], names: tuple[str, str, str], source: str) -> Ranks:
    try:
        rank, local_rank, world_size = (int(environ[name]) for name in names)
    except (KeyError, ValueError) as error:
        values = ", ".join(f"{name}={environ.get(name)}" for name in names)
        raise TrainerError(
            f"{socket.gethostname()}: {source} should set {', '.join(names)}: {values}"
        ) from error
    return Ranks(rank, local_rank, world_size, source)


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
        _take_gpu(ranks)
    timeout = datetime.timedelta(minutes=config.training.distributed_timeout_minutes)
    torch.distributed.init_process_group(
        backend="nccl" if config.device == "cuda" else "gloo",
        store=_store(ranks, environ, timeout),
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
        except (OSError, TrainerError) as error:
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


def _take_gpu(ranks: Ranks) -> None:
    # With --gpus-per-task each process sees one GPU, its own.
    count = torch.cuda.device_count()
    if count > 1 and ranks.local_rank >= count:
        raise TrainerError(f"{ranks}: local rank {ranks.local_rank}, but this node shows {count} GPUs")
    torch.cuda.set_device(ranks.local_rank if count > 1 else 0)


def _store(ranks: Ranks, environ: Mapping[str, str], timeout: datetime.timedelta) -> torch.distributed.Store:
    """Where the ranks find each other; alone, a process needs no port."""
    if ranks.world_size == 1:
        return torch.distributed.HashStore()
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise TrainerError(f"{ranks}: {' and '.join(missing)} not set, so the ranks cannot meet")
    # torchrun's agent already runs a store at this address; its ranks are all clients.
    hosts_store = ranks.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = torch.distributed.TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        world_size=ranks.world_size,
        is_master=hosts_store,
        timeout=timeout,
    )
    return torch.distributed.PrefixStore("trainer", store)
