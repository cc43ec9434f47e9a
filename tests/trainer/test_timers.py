"""The stopwatches that Megatron-Core starts and stops around the parts of a step."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.patience import PATIENCE_S
from tests.trainer.runs import ROOT
from trainer.metrics.timers import Timers, Times


def test_cores_timers_are_summed_by_kind_and_other_names_are_ignored() -> None:
    timers = Timers("cpu")
    for name in (
        "forward-compute",
        "all-grads-sync",
        "optimizer-inner-step",
        "forward-recv",
        "of the future",
    ):
        timers(name, log_level=2).start(barrier=True)  # Core asks for one; no rank waits for another here
        timers(name).stop()
    times = timers.totals()
    assert min(times.compute_s, times.communication_s, times.update_s) > 0
    assert times.batch_s == times.data_wait_s == 0
    assert timers.totals() - times == Times()


def test_waiting_for_a_batch_is_not_compute_time() -> None:
    timers = Timers("cpu")
    ready: list[str] = []

    def slow_batches() -> Iterator[str]:
        while len(ready) < 2:
            sum(range(100_000))
            ready.append("batch")
            yield "batch"

    batches = timers.waited_for(slow_batches())
    for _ in range(2):
        timers("forward-compute").start()
        assert next(batches) == "batch"
        timers("forward-compute").stop()
    assert next(batches, None) is None
    times = timers.totals()
    assert times.data_wait_s > 0
    assert times.compute_s < times.batch_s


def test_an_evaluation_is_not_part_of_a_step() -> None:
    timers = Timers("cpu")
    with timers.paused():
        timers("forward-compute").start()
        timers("forward-compute").stop()
    assert timers.totals() == Times()


NEVER_WAITS = """
import torch
from trainer.metrics.timers import Timers

timers = Timers("cuda")
torch.cuda.synchronize()
torch.cuda.set_sync_debug_mode("error")
timers("forward-compute").start()
torch.cuda._sleep(2_000_000_000)  # cycles: about a second
timers("forward-compute").stop()
assert timers.totals().compute_s == 0, "read before the GPU was there"
torch.cuda.set_sync_debug_mode("default")
torch.cuda.synchronize()
compute_s = timers.totals().compute_s
assert 0.2 < compute_s < 5, compute_s
for _ in range(3 * 256):
    timers("backward-compute").start()
    timers("backward-compute").stop()
torch.cuda.synchronize()
timers.totals()
"""


@pytest.mark.process
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
def test_on_a_gpu_nothing_is_waited_for(tmp_path: Path) -> None:
    script = tmp_path / "never_waits.py"
    script.write_text(NEVER_WAITS)
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    subprocess.run(
        [sys.executable, script], check=True, env=os.environ | {"PYTHONPATH": path}, timeout=PATIENCE_S
    )
