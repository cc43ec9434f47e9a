"""Power and clock of a GPU under a load, once they are steady."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from trainer.calibration import attention, products

SIDE = 8192
INTERVAL_S = 1.0
PRODUCT = {"pass": "forward", "m": SIDE, "n": SIDE, "k": SIDE, "groups": 1}


def measure(job: dict[str, Any], seconds: float, device: str) -> dict[str, Any]:
    """Median power and clock in the second half of the `seconds` of the job."""
    samples: list[tuple[float, float]] = []
    ended = threading.Event()
    watch = threading.Thread(target=_sample, args=(samples, ended), daemon=True)
    call = _loaded(job["load"])
    watch.start()
    end = time.monotonic() + job["seconds"]
    while time.monotonic() < end:
        for _ in range(50):
            call()
        torch.cuda.synchronize()
    ended.set()
    watch.join()
    if not samples:
        raise RuntimeError("nvidia-smi gave no power and clock")
    steady = samples[len(samples) // 2 :]
    watts, sm_mhz = (statistics.median(each) for each in zip(*steady, strict=True))
    return {"watts": watts, "sm_mhz": sm_mhz}


def _loaded(load: str) -> Callable[[], object]:
    """Return a function that starts one kernel of the load."""
    if load == "memory":
        a, b = (torch.randn(2**28, device="cuda") for _ in range(2))
        return lambda: a.copy_(b)
    if load == "attention":
        q, k, v = (torch.randn(8192, 1, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        engine = attention.of_transformer_engine(32, 32, 128, 128)
        return lambda: engine(q, k, v)
    return products.product(PRODUCT | {"precision": load.removesuffix("_products")}, "cuda")


def _sample(samples: list[tuple[float, float]], ended: threading.Event) -> None:
    """Append power (W) and SM clock (MHz) of this process's GPU every second, as long as nvidia-smi tells them."""
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    query = ["nvidia-smi", "-i", uuid, "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits"]
    while not ended.wait(INTERVAL_S):
        try:
            watts, sm_mhz = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(
                ","
            )
            samples.append((float(watts), float(sm_mhz)))
        except (OSError, subprocess.SubprocessError, ValueError):
            return
