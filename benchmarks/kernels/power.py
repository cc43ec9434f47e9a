"""`python -m benchmarks.kernels.power LOAD ROWS`: power and clock of one GPU under a load, once they are steady."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.kernels import attention, products

SIDE = 8192
INTERVAL_S = 1.0
PRODUCT = {"pass": "forward", "m": SIDE, "n": SIDE, "k": SIDE, "groups": 1}
LOADS = ("fp8_products", "bf16_products", "attention", "memory", "idle")


def main() -> None:
    """Run the load and append a row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("load", choices=LOADS)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seconds", type=float, default=120)
    arguments = parser.parse_args()
    samples: list[tuple[float, float]] = []
    ended = threading.Event()
    watch = threading.Thread(target=sample, args=(samples, ended))
    run(arguments.load, arguments.seconds, watch)
    ended.set()
    watch.join()
    steady = samples[len(samples) // 2 :]
    watts, sm_mhz = (statistics.median(each) for each in zip(*steady, strict=True))
    row = {"load": arguments.load, "seconds": arguments.seconds, "watts": watts, "sm_mhz": sm_mhz}
    with arguments.rows.open("a") as rows:
        rows.write(json.dumps(row) + "\n")


def run(load: str, seconds: float, watch: threading.Thread) -> None:
    """Keep the GPU busy with the load."""
    torch.cuda.init()
    call = loaded(load)
    watch.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(50):
            call()
        torch.cuda.synchronize()


def loaded(load: str) -> Callable[[], object]:
    """Return a function that starts one kernel of the load."""
    if load == "idle":
        return lambda: time.sleep(0.02)
    if load == "memory":
        a, b = (torch.randn(2**28, device="cuda") for _ in range(2))
        return lambda: a.copy_(b)
    if load == "attention":
        q, k, v = (torch.randn(8192, 1, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        engine = attention.of_transformer_engine(32, 32, 128, 128)
        return lambda: engine(q, k, v)
    return products.product(PRODUCT | {"precision": load.removesuffix("_products")}, "cuda")


def sample(samples: list[tuple[float, float]], ended: threading.Event) -> None:
    """Append power (W) and SM clock (MHz) of this process's GPU every second."""
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    query = ["nvidia-smi", "-i", uuid, "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits"]
    while not ended.wait(INTERVAL_S):
        watts, sm_mhz = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")
        samples.append((float(watts), float(sm_mhz)))


if __name__ == "__main__":
    main()
