"""The process groups of a model for inference. Imports megatron.core, so it must come after `start.prepare_device`."""

from __future__ import annotations

import os

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.contract.config import TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.distributed import groups
from trainer.distributed.loopback import on_loopback
from trainer.distributed.rendezvous import Ranks


def open_groups(config: TrainerConfig, ranks: Ranks) -> ProcessGroupCollection:
    """The process groups of the layout. A single process reuses the groups that an earlier call has opened.

    Raises:
        TrainerError: the ranks do not match the layout, or other process groups exist.
        LostPeersError: not all ranks connected.
    """
    if torch.distributed.is_initialized():
        if torch.distributed.get_world_size() != 1 or not parallel_state.model_parallel_is_initialized():
            raise TrainerError(
                "torch.distributed is already initialized in this process. Load the model in a process of its own"
            )
        return ProcessGroupCollection.use_mpu_process_groups()
    with on_loopback(ranks.world_size):
        return groups.initialize(config, ranks, os.environ)
