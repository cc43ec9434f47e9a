"""Prepares this process for inference, before it imports megatron.core."""

from __future__ import annotations

from typing import Literal

from trainer.contract.errors import TrainerError
from trainer.distributed import device
from trainer.metrics.console import quiet_libraries


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
