"""A trial as its ranks run it: measured, out of memory, failed, hung."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.forked import ROOT, run_ranks
from tests.trainer.runs import GPT, environment, free_port, gpt_config
from trainer.contract.config import TrainerConfig, from_dict
from trainer.contract.trials import TrialConfig, TrialResult, TrialsConfig, result_path

pytestmark = pytest.mark.process

TP2_PP2 = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 2,
}


def run_trial(
    directory: Path,
    world_size: int,
    *,
    started: int | None = None,
    model: dict[str, Any] | None = None,
    parallelism: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    time_limit_s: int = 3600,
    device: str = "cpu",
    modules: Path | None = None,
) -> tuple[list[subprocess.CompletedProcess[str]], TrialResult | None]:
    """Runs a trial with its ranks, or only the first `started` of them. Modules in the directory `modules` hide
    installed ones. Returns the ranks and the result's file.
    """
    document = gpt_config("none", directory, GPT | (model or {}))
    document |= {"world_size": world_size, "parallelism": parallelism or {}, "device": device}
    document["training"] |= training or {}
    trial = TrialConfig(name="the trial", key="0123", trainer=from_dict(TrainerConfig, document, "test"))
    config = TrialsConfig(warmup_steps=1, steps=3, time_limit_s=time_limit_s, trials=(trial,))
    path = directory / "trials.json"
    path.write_text(json.dumps(dataclasses.asdict(config)))
    port, arguments = free_port(), ("-m", "trainer.trials", "--config", str(path), "--trial", "0123")
    ranks = range(world_size if started is None else started)
    environments = [environment(rank, world_size, port) for rank in ranks]
    if modules is not None:
        environments = [each | {"PYTHONPATH": f"{modules}:{ROOT}"} for each in environments]
    # a fork has the CPU's stand-ins and all modules
    is_fork = device == "cpu" and modules is None
    done = run_ranks(arguments, environments) if is_fork else [_alone(arguments, environments[0])]
    file = result_path(str(directory), "0123")
    return done, from_dict(TrialResult, json.loads(file.read_text()), "result") if file.exists() else None


def _alone(arguments: Sequence[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


def test_all_ranks_measure_a_trial_without_data(tmp_path: Path) -> None:
    ramp_up = {"global_batch_size": 8, "rampup_batch_size": [2, 2, 8]}
    done, result = run_trial(tmp_path, 4, parallelism=TP2_PP2, training=ramp_up)
    assert [rank.returncode for rank in done] == [0] * 4, done[0].stderr
    assert result is not None
    assert (result.name, result.status, result.reason) == ("the trial", "measured", "")
    assert len(result.all_step_s) == 3
    assert result.step_s == statistics.median(result.all_step_s) > 0
    assert result.tokens_per_s == pytest.approx(8 * 64 / result.step_s)  # the full batch
    assert result.compute_s is not None
    assert 0 < result.compute_s < sum(result.all_step_s)
    assert result.in_use_gib is not None
    assert result.in_use_gib > 0.05
    assert result.fullest_rank in range(4)
    # the run itself has not begun
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trials.json", "tune"]


def test_a_trial_that_does_not_fit_is_a_result(tmp_path: Path) -> None:
    """No address space is large enough for its weights."""
    [done], result = run_trial(tmp_path, 1, model={"ffn_hidden_size": 2**42})
    assert done.returncode == 1
    assert result is not None
    assert result.status == "out of memory"
    assert "rank 0 of pipeline stage 0 on " in result.reason
    assert "you tried to allocate" in result.reason
    assert result.in_use_gib is not None
    assert "Traceback" not in done.stderr


def test_a_trial_that_the_trainer_refuses_says_why(tmp_path: Path) -> None:
    [done], result = run_trial(tmp_path, 1, parallelism={"tensor_model_parallel_size": 2})
    assert done.returncode == 2
    assert result is not None
    assert result.status == "failed"
    assert "TP x PP x CP = 2 x 1 x 1 = 2 does not divide" in result.reason


def test_a_trial_that_hangs_ends_with_the_place_of_the_hang(tmp_path: Path) -> None:
    """The second rank never comes."""
    [done], result = run_trial(tmp_path, 2, started=1, time_limit_s=1)
    assert done.returncode == 4
    assert result is not None
    assert result.status == "hung"
    assert result.reason.startswith("no result after 1 s; rank 0 on ")
    assert "rendezvous.py" in result.reason
    assert "Current thread" in done.stderr  # the stacks


def test_a_trial_that_hangs_while_it_imports_torch_says_so(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(3600)\n")
    [done], result = run_trial(tmp_path, 1, time_limit_s=1, modules=tmp_path)
    assert done.returncode == 4
    assert result is not None
    assert result.status == "hung"
    assert "device.py" in result.reason


def test_a_trial_that_cannot_import_torch_says_why(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')\n")
    [done], result = run_trial(tmp_path, 1, modules=tmp_path)
    assert done.returncode == 1
    assert result is not None
    assert (result.status, result.reason) == ("failed", "libcudart.so.13: no such file")
    assert "Traceback" in done.stderr
