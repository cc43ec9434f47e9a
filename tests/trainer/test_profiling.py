"""Choice of the steps to profile. test_metrics.py tests the contents of traces."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.trainer.runs import gpt_config
from trainer.contract import config as configuration
from trainer.contract.config import LoggingConfig, TrainerConfig
from trainer.contract.files.run_directory import RunDirectory
from trainer.metrics.profiling import Profiler


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    return configuration.from_dict(TrainerConfig, gpt_config("x", tmp_path), "test")


def profiler(config: TrainerConfig, rank: int = 0, **logging: object) -> Profiler:
    config = dataclasses.replace(config, logging=LoggingConfig(**logging))  # type: ignore[arg-type]
    return Profiler(config, RunDirectory.of(config), rank)


def test_requested_steps_are_recorded_even_if_the_run_ends_early(
    config: TrainerConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = profiler(config, rank=3, profile_step_start=4, profile_step_end=9, profile_ranks=(1, 3))
    took_time = [recorder.before(iteration) for iteration in range(2, 7)]
    assert took_time == [False, False, True, False, False]
    recorder.close(7)
    [trace] = (tmp_path / "profile").iterdir()
    assert trace.name == "iterations-4-6-rank-3.json.gz"
    assert f"rank 3: profile written to {trace}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rank", "logging", "iterations"),
    [
        pytest.param(0, {}, range(1, 20), id="not asked for"),
        pytest.param(1, {"profile_step_start": 2}, range(1, 20), id="another rank"),
        pytest.param(0, {"profile_step_start": 2}, range(4, 20), id="an attempt that begins later"),
    ],
)
def test_other_ranks_and_steps_are_left_alone(
    config: TrainerConfig, tmp_path: Path, rank: int, logging: dict[str, object], iterations: range
) -> None:
    recorder = profiler(config, rank, **logging)
    assert not any(recorder.before(iteration) for iteration in iterations)
    recorder.close(20)
    assert list(tmp_path.iterdir()) == []
