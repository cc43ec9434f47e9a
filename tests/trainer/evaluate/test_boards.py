"""Results in Weights & Biases, without its service. tests/trainer/evaluate/test_job.py reads TensorBoard's files."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from trainer.contract.config import from_dict
from trainer.contract.evaluation import EvaluationConfig, EvaluationResult, read_result, result_file
from trainer.evaluate import boards
from trainer.evaluate.results import write_result
from trainer.metrics.console import Log

RESULT = {
    "format": 1,
    "name": "test",
    "iteration": 40,
    "checkpoint": "/run/checkpoints/iter_0000040",
    "checkpoint_sha256": "0" * 64,
    "time": 1.0,
    "seconds": 2.0,
    "world_size": 1,
    "device": "cpu",
    "precision": "fp32",
    "tokenizer": "gpt2",
    "settings": {"tasks": ["gsm8k"]},
    "versions": {"torch": "2"},
    "data": [
        {
            "name": "web",
            "prefix": "/web",
            "loss": 2.0,
            "perplexity": None,
            "tokens": 9,
            "sequences": 1,
            "seq_length": 9,
            "seconds": 1.0,
        }
    ],
    "tasks": [
        {
            "name": "gsm8k",
            "is_group": False,
            "version": "3.0",
            "num_fewshot": 5,
            "documents": 4,
            "metrics": [
                {
                    "name": "exact_match",
                    "filter": name,
                    "value": value,
                    "stderr": None,
                    "higher_is_better": True,
                }
                for name, value in (("none", 0.25), ("strict-match", 0.5))
            ],
        }
    ],
    "samples": "iter_0000040.samples.jsonl",
}


class FakeRun:
    """A W&B run that keeps what is logged."""

    url = "https://example.org/run"

    def __init__(self) -> None:
        self.axes: list[Any] = []
        self.logged: list[dict[str, float]] = []
        self.is_finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def result(tmp_path: Path) -> EvaluationResult:
    """A result whose file is written."""
    found = from_dict(EvaluationResult, RESULT, "test")
    write_result(tmp_path, found, [{"task": "gsm8k", "doc_id": 0, "target": "é"}])
    return found


@pytest.fixture
def config(tmp_path: Path) -> EvaluationConfig:
    return EvaluationConfig(
        name="big",
        run_dir=str(tmp_path),
        device="cpu",
        world_size=1,
        checkpoint="checkpoints",
        settings=from_dict(EvaluationResult, RESULT, "test").settings,
        tensorboard=False,
        wandb_project="models",
    )


def test_a_result_file_is_read_as_it_was_written(result: EvaluationResult, tmp_path: Path) -> None:
    assert read_result(result_file(tmp_path, 40)) == result
    samples = tmp_path / "evaluation" / str(result.samples)
    assert samples.read_text() == '{"task": "gsm8k", "doc_id": 0, "target": "é"}\n'


def test_results_have_a_wandb_run_of_their_own_whose_axis_is_the_iteration(
    result: EvaluationResult, config: EvaluationConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb-run-id").write_text("abc123\n")
    run, started = FakeRun(), []
    module = types.SimpleNamespace(
        init=lambda **arguments: started.append(arguments) or run,
        Settings=lambda **arguments: arguments,
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    boards.draw(config, result, Log(is_rank_0=True, progress=False))
    [arguments] = started
    assert (arguments["project"], arguments["id"], arguments["group"]) == (
        "models",
        "abc123-evaluation",
        "big",
    )
    assert run.axes == [("iteration", None), ("*", "iteration")]
    assert run.logged == [
        {
            "iteration": 40,
            "evaluation/web/loss": 2.0,
            "evaluation/gsm8k/exact_match": 0.25,
            "evaluation/gsm8k/exact_match,strict-match": 0.5,
        }
    ]
    assert run.is_finished


def test_a_damaged_file_of_another_checkpoint_costs_a_line(
    result: EvaluationResult,
    config: EvaluationConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result_file(tmp_path, 20).write_text("{")
    drawn = EvaluationConfig(**{**vars(config), "tensorboard": True, "wandb_project": None})
    boards.draw(drawn, result, Log(is_rank_0=True, progress=False))
    [line] = capsys.readouterr().out.splitlines()
    assert "iter_0000020.json: not JSON" in line
    assert len(list((tmp_path / "tensorboard/evaluation").iterdir())) == 1
