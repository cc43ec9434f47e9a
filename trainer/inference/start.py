"""Prepares this process for inference: its device, its ranks and their process groups."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from trainer.contract.config import TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.distributed import device
from trainer.distributed.loopback import on_loopback
from trainer.distributed.rendezvous import Ranks
from trainer.metrics.console import quiet_libraries

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


def prepare_device(name: Literal["cuda", "cpu"] | None) -> Literal["cuda", "cpu"]:
    """Prepare this process to compute on a device, by default on a GPU if there is one. Returns its name.

    Raises:
        TrainerError: torch or Megatron-Core is not installed, or there is no GPU although it was requested.
    """
    quiet_libraries()
    try:
        import torch

        chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
        device.prepare(chosen)
        import megatron.core  # noqa: F401
    except ModuleNotFoundError as error:
        raise TrainerError(f"{error.name} is not installed. Install hpcgen[train]") from error
    return chosen


def open_groups(config: TrainerConfig, ranks: Ranks) -> ProcessGroupCollection:
    """The process groups of the layout. A single process reuses the groups that an earlier call has opened.

    Raises:
        TrainerError: the ranks do not match the layout, or other process groups exist.
        LostPeersError: not all ranks connected.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from trainer.distributed import groups

    if torch.distributed.is_initialized():
        if torch.distributed.get_world_size() != 1 or not parallel_state.model_parallel_is_initialized():
            raise TrainerError(
                "torch.distributed is already initialized in this process. Load the model in a process of its own"
            )
        return ProcessGroupCollection.use_mpu_process_groups()
    with on_loopback(ranks.world_size):
        return groups.initialize(config, ranks, os.environ)
