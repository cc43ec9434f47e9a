"""Who this process is among the ranks, and where the ranks meet. Imports torch only where it is used."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.errors import TrainerError

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class Ranks:
    """This process's place, and what told us."""

    rank: int
    local_rank: int
    world_size: int
    source: str

    @property
    def name(self) -> str:
        """For lines of this process in a log that all ranks share."""
        return f"rank {self.rank} on {socket.gethostname()}"

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


def take_gpu(ranks: Ranks) -> None:
    """Makes this process compute on the GPU of its local rank.

    Raises:
        TrainerError: the node shows fewer GPUs than it has ranks.
    """
    import torch

    # With --gpus-per-task each process sees one GPU, its own.
    count = torch.cuda.device_count()
    if count > 1 and ranks.local_rank >= count:
        raise TrainerError(f"{ranks}: local rank {ranks.local_rank}, but this node shows {count} GPUs")
    torch.cuda.set_device(ranks.local_rank if count > 1 else 0)


def open_store(
    ranks: Ranks,
    environ: Mapping[str, str],
    timeout: datetime.timedelta,
    *,
    hosts: bool = True,
    waits: bool = True,
) -> Store:
    """Where the ranks find each other; alone, a process needs no port.

    Rank 0 hosts the store; with `hosts` false it too only connects to the store that it has opened already.
    `waits` returns when every rank is there.

    Raises:
        TrainerError: no address was given to meet at.
    """
    from torch.distributed import HashStore, PrefixStore, TCPStore

    if ranks.world_size == 1:
        return HashStore()
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise TrainerError(f"{ranks}: {' and '.join(missing)} not set, so the ranks cannot meet")
    # torchrun's agent already runs a store at this address; its ranks are all clients.
    is_master = hosts and ranks.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        world_size=ranks.world_size,
        is_master=is_master,
        timeout=timeout,
        wait_for_workers=waits,
    )
    # The agent's store outlives the ranks that it starts again, and with it all that those before them said.
    return PrefixStore(f"trainer/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
