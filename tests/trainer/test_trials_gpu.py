"""Trials on a real GPU (make test-gpu): the memory of one that fits, and one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.test_trials import run_trial

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = {"precision": "bf16"}


def test_a_trial_measures_the_memory_of_its_device(tmp_path: Path) -> None:
    [done], result = run_trial(tmp_path, 1, training=BF16, device="cuda")
    assert done.returncode == 0, done.stderr
    assert result is not None
    assert result.status == "measured"
    assert None not in (result.allocated_gib, result.reserved_gib, result.in_use_gib, result.device_gib)
    assert 0 < result.allocated_gib <= result.reserved_gib < result.in_use_gib < result.device_gib


def test_a_trial_that_does_not_fit_is_a_result_with_its_memory(tmp_path: Path) -> None:
    large = {"hidden_size": 32_768, "num_layers": 8}
    [done], result = run_trial(tmp_path, 1, model=large, training=BF16, device="cuda")
    assert done.returncode == 1
    assert result is not None
    assert result.status == "out of memory"
    assert "rank 0 of pipeline stage 0 on " in result.reason
    assert None not in (result.allocated_gib, result.device_gib)
    assert result.device_gib / 2 < result.allocated_gib < result.device_gib
