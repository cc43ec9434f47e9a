"""Where, when and with what a benchmark measured."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

QUERY = ("nvidia-smi", "--query-gpu=name,power.limit,driver_version", "--format=csv,noheader")


def machine(device: str) -> dict[str, Any]:
    """The GPUs of this machine, the date and the versions of the software."""
    today = time.strftime("%Y-%m-%d")
    if device == "cpu":
        return {"machine": "CPUs, to try the program", "date": today}
    import megatron.core
    import torch

    from trainer.metrics.versions import distribution_version

    gpus = subprocess.run(QUERY, capture_output=True, text=True, check=True).stdout.splitlines()
    name, limit, driver = gpus[0].split(", ")
    return {
        "machine": f"{len(gpus)} x {name}, {limit}, {os.cpu_count()} CPU cores",
        "date": today,
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
