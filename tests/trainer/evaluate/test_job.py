"""Perplexities, the choice of checkpoints, and what a job leaves behind. None of these tests needs lm-eval."""

from __future__ import annotations

import math
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE_S
from tests.trainer.evaluate import parts
from tests.trainer.runs import GPT, finished, gpt_config, write_corpus
from trainer.contract.config import ConfigError
from trainer.contract.errors import TrainerError
from trainer.contract.evaluation import evaluated, read_result, result_file

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def checkpoints(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 2, 4 and 6."""
    config = gpt_config(corpus, tmp_path_factory.mktemp("trained"), GPT | {"num_layers": 1})
    config["checkpoint"] = {"save_interval": 2, "keep_last": None}
    return finished(config).checkpoints


def job(checkpoint: Path, run_dir: Path, prefix: str, **settings: Any) -> dict[str, Any]:
    data = [{"name": "text", "prefix": prefix}]
    return parts.configuration(checkpoint, run_dir, data=data, **settings)


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    model = parts.import_case("gpt2", tmp_path)
    tokens = parts.write_text(tmp_path / "text").tolist()
    result, _ = parts.evaluated(job(model.checkpoint, tmp_path / "run", str(tmp_path / "text")))
    [text] = result.data
    windows = [tokens[first : first + text.seq_length + 1] for first in range(0, 499, text.seq_length)]
    assert len(windows[-1]) < len(windows[0]), "a shorter window is part of the test"
    assert (text.sequences, text.tokens) == (len(windows), 499)
    assert text.loss is not None
    assert text.loss == pytest.approx(parts.reference_loss(model.exported, windows), abs=1e-5)
    assert text.perplexity == pytest.approx(math.exp(text.loss))
    assert (result.checkpoint, result.precision) == (str(model.checkpoint), "fp32")
    assert result.settings.data[0].prefix == str(tmp_path / "text")
    assert result.versions["megatron-core"] != ""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [(1, {}), (2, {}), (2, {"tensor_model_parallel_size": 2}), (2, {"pipeline_model_parallel_size": 2})],
    ids=["1 GPU", "2 replicas", "TP2", "PP2"],
)
def test_gpus_compute_the_loss_of_transformers(
    world_size: int, sizes: dict[str, int], tmp_path: Path
) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    model = parts.import_case("llama3.2", tmp_path)
    tokens = parts.write_text(tmp_path / "text").tolist()
    config = job(model.checkpoint, tmp_path / "run", str(tmp_path / "text"), **sizes)
    result, _ = parts.evaluated(config | {"device": "cuda", "world_size": world_size})
    [text] = result.data
    windows = [tokens[first : first + text.seq_length + 1] for first in range(0, 499, text.seq_length)]
    assert text.tokens == 499
    assert text.loss == pytest.approx(parts.reference_loss(model.exported, windows), abs=1e-4)


def points(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    """Steps and numbers in TensorBoard's files."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    [file] = (run_dir / "tensorboard/evaluation").iterdir()
    found = []
    for event in EventFileLoader(str(file)).Load():
        values = {value.tag: value.tensor.float_val[0] for value in event.summary.value}
        if values:
            found.append((event.step, values))
    return found


def test_due_checkpoints_are_evaluated_once_and_the_newest_first(
    checkpoints: Path, corpus: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = job(checkpoints, run_dir, corpus, every=4, limit=3) | {"tensorboard": True}
    assert parts.finish(config)[0] == [0]
    assert evaluated(run_dir) == {4}
    config["settings"]["every"] = 2
    statuses, log = parts.finish(config)
    assert statuses == [0], log
    assert "evaluates 2 checkpoints (iterations 6, 2)" in log
    assert log.index("iteration 6: evaluated") < log.index("iteration 2: evaluated")
    assert evaluated(run_dir) == {2, 4, 6}
    results = [read_result(result_file(run_dir, iteration)) for iteration in (2, 4, 6)]
    steps = points(run_dir)
    assert [step for step, _ in steps] == [2, 4, 6]
    for (_, values), result in zip(steps, results, strict=True):
        assert values["evaluation/text/loss"] == pytest.approx(result.data[0].loss)
        assert values["evaluation/text/perplexity"] == pytest.approx(result.data[0].perplexity)
    assert len({result.checkpoint_sha256 for result in results}) == 3
    before = result_file(run_dir, 6).stat().st_mtime_ns
    statuses, log = parts.finish(config)
    assert statuses == [0]
    assert "each checkpoint of evaluation.every = 2 has a result, nothing to do" in log
    assert result_file(run_dir, 6).stat().st_mtime_ns == before


def test_without_every_the_newest_checkpoint_is_evaluated(
    checkpoints: Path, corpus: str, tmp_path: Path
) -> None:
    assert parts.finish(job(checkpoints, tmp_path / "run", corpus, limit=1))[0] == [0]
    assert evaluated(tmp_path / "run") == {6}


def test_a_terminated_job_keeps_the_results_that_it_has(checkpoints: Path, tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "long", documents=200)
    config = job(checkpoints, tmp_path / "run", prefix, every=2, batch_size=1)
    [process] = parts.start(config)
    first = result_file(tmp_path / "run", 6)
    while not first.exists():
        assert process.poll() is None, (tmp_path / "run/log").read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=PATIENCE_S) == 143
    log = (tmp_path / "run/log").read_text()
    assert re.search(r"SIGTERM; 1 checkpoint evaluated, the others are left to the next job", log), log
    assert read_result(first).iteration == 6
    assert [path.name for path in first.parent.iterdir()] == [first.name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 3}, "the layout was planned for world_size = 3"),
        (
            {"world_size": 3, "settings": {"tensor_model_parallel_size": 2}},
            "results in TP x PP = 2 x 1 = 2, which does not divide 3 ranks",
        ),
        ({"settings": {"data": []}}, "evaluation has neither data nor tasks"),
        ({"settings": {"batch_size": 0}}, "settings: batch_size = 0"),
        ({"checkpoint": "/missing"}, "/missing: no such directory"),
    ],
    ids=["ranks", "replicas", "nothing", "value", "checkpoint"],
)
def test_what_cannot_be_computed_is_refused(
    changes: dict[str, Any], message: str, checkpoints: Path, corpus: str, tmp_path: Path
) -> None:
    config = job(checkpoints, tmp_path / "run", corpus)
    config["settings"] |= changes.pop("settings", {})
    statuses, log = parts.finish(config | changes, ranks=1)
    assert statuses == [2]
    assert message in log
    assert not (tmp_path / "run/evaluation").exists()


def test_result_files_of_later_versions_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    path = result_file(tmp_path, 5)
    path.parent.mkdir()
    path.write_text('{"format": 2}')
    with pytest.raises(ConfigError, match="later version"):
        read_result(path)
    path.write_text("{")
    with pytest.raises(TrainerError, match="not JSON"):
        read_result(path)
