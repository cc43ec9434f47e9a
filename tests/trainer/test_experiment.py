"""Weights & Biases without its service. Tests that need the library are skipped if it is missing."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.trainer.runs import ROOT, gpt_config
from trainer.contract import config as configuration
from trainer.contract.config import LoggingConfig, TrainerConfig
from trainer.contract.files.run_directory import RunDirectory
from trainer.metrics.console import Log
from trainer.metrics.wandb import Experiment, open_experiment, run_id

KEY = "0123456789" * 4

ATTEMPT = """
import sys
from pathlib import Path
from trainer.contract import config as configuration
from trainer.metrics import wandb
from trainer.metrics.console import Log
from trainer.contract.files.run_directory import RunDirectory

wandb.INIT_TIMEOUT_S = wandb.FINISH_TIMEOUT_S = 3
config = configuration.read(Path(sys.argv[1]))
board = wandb.open_experiment(config, RunDirectory.of(config), Log(is_rank_0=True, progress=False))
for iteration in (1, 2, 3):
    board.scalars(iteration, {"train/loss": 1.0 / iteration})
board.close()
"""


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    config = configuration.from_dict(TrainerConfig, gpt_config("x", tmp_path / "run dir"), "test")
    (tmp_path / "run dir").mkdir()
    return dataclasses.replace(config, logging=LoggingConfig(wandb_project="test"))


def attempt(config: TrainerConfig, **environ: str) -> str:
    """Runs one attempt with the real library and returns its output."""
    config_file = Path(config.run_dir) / "config.json"
    config_file.write_text(json.dumps(configuration.to_dict(config)))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPT, str(config_file)],
        env=inherited | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"} | environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.process
@pytest.mark.slow
def test_all_attempts_share_one_offline_run_with_its_upload_command(
    config: TrainerConfig, tmp_path: Path
) -> None:
    pytest.importorskip("wandb")
    first, second = attempt(config), attempt(config)
    identity = (tmp_path / "run dir" / "wandb-run-id").read_text().strip()
    files = sorted((tmp_path / "run dir" / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{identity}.wandb"] * len(files)
    for shown in (first, second):
        assert shown.count(f"wandb sync '{tmp_path}/run dir/wandb'") == 2, "at its start and at its end"
    assert "WANDB_API_KEY is not set" in first


@pytest.mark.process
@pytest.mark.slow
def test_an_unreachable_service_costs_one_line_and_the_key_is_not_written(
    config: TrainerConfig, tmp_path: Path
) -> None:
    pytest.importorskip("wandb")
    shown = attempt(config, WANDB_API_KEY=KEY, WANDB_BASE_URL="http://127.0.0.1:9")
    assert "Weights & Biases (online) cannot be used" in shown
    assert "Weights & Biases: offline" in shown
    assert list((tmp_path / "run dir" / "wandb").glob("offline-run-*/*.wandb"))
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in written if KEY.encode() in path.read_bytes()] == []
    assert KEY not in shown


def test_without_the_library_a_line_tells_how_to_install_it(
    config: TrainerConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    log = Log(is_rank_0=True, progress=False)
    assert open_experiment(config, RunDirectory.of(config), log) is None
    assert "Install wandb (the extra hpcgen[wandb])" in capsys.readouterr().out


class LostRun:
    """A W&B run whose process died."""

    def __init__(self) -> None:
        self.calls = 0

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, values: dict[str, float]) -> None:
        self.calls += 1
        raise BrokenPipeError(f"broken pipe, key {KEY}")

    finish = log


def test_a_lost_connection_is_logged_once_without_the_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    run = LostRun()
    board = Experiment(run, Log(is_rank_0=True, progress=False), sync_command=None)
    for iteration in range(3):
        board.scalars(iteration, {"train/loss": 1.0})
    board.close()
    assert run.calls == 1
    [line] = capsys.readouterr().out.splitlines()
    assert "broken pipe, key ***" in line


def test_the_id_is_drawn_once_and_again_only_when_it_is_damaged(tmp_path: Path) -> None:
    run = RunDirectory(root=tmp_path, checkpoints=tmp_path / "c", index_cache=tmp_path / "i")
    first = run_id(run)
    assert run_id(run) == first
    run.wandb_id.write_text("")
    assert run_id(run) not in (first, "")
