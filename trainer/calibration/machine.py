"""Where, when and with which software something was measured."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from typing import Any

import torch

from trainer.metrics.versions import distribution_version

QUERY = ("nvidia-smi", "--query-gpu=power.limit,driver_version", "--format=csv,noheader")


def gpu_name(device: str) -> str | None:
    """The name of this process's GPU; None for a CPU."""
    return None if device == "cpu" else torch.cuda.get_device_name()


def machine(device: str) -> dict[str, Any]:
    """This machine, the date and the versions of the software."""
    found: dict[str, Any] = {"machine": f"{os.cpu_count()} CPU cores", "date": time.strftime("%Y-%m-%d")}
    if device == "cpu":
        return found | {"versions": {"torch": torch.__version__}}
    import megatron.core

    number, limit, driver = torch.cuda.device_count(), "unknown", "unknown"
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        lines = subprocess.run(QUERY, capture_output=True, text=True, check=True).stdout.splitlines()
        number, (limit, driver) = len(lines), lines[0].split(", ")
    name = torch.cuda.get_device_name()
    return {
        "machine": f"{number} x {name}, power limit {limit}, {found['machine']}",
        "date": found["date"],
        "versions": {
            "megatron-core": megatron.core.__version__,
            "transformer-engine": distribution_version("transformer-engine"),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": driver,
        },
    }
