"""Custom layers, model and schedule from the examples, with several layouts and a resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import LLAMA, ROOT, Run, finished, gpt_config, run

pytestmark = pytest.mark.process

EXAMPLES = ("custom_layers.py", "custom_model.py", "cosine_restarts.py")


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's directory with the examples."""
    directory = tmp_path_factory.mktemp("mine")
    for name in EXAMPLES:
        shutil.copy(ROOT / "examples" / name, directory)
    return directory


def custom(corpus: str, run_dir: Path, mine: Path) -> dict[str, Any]:
    config = gpt_config(corpus, run_dir, LLAMA)
    config["world_size"] = 2
    config["model"] |= {
        "layer_spec": f"{mine}/custom_layers.py:parallel_layers",
        "model_provider": f"{mine}/custom_model.py:CappedGPT",
    }
    config["optimizer"]["lr_schedule"] = f"{mine}/cosine_restarts.py:rate"
    config["checkpoint"] = {"save_interval": 3}
    return config


def test_the_examples_resume_at_another_layout(
    corpus: str, mine: Path, single_llama: Run, tmp_path: Path
) -> None:
    first = custom(corpus, tmp_path / "first", mine)
    first["parallelism"] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    undisturbed = finished(first)
    assert undisturbed.steps[0][1] != pytest.approx(single_llama.steps[0][1], abs=1e-4)
    middle = tmp_path / "middle"
    shutil.copytree(undisturbed.checkpoints / "iter_0000003", middle / "iter_0000003")
    (middle / "latest_checkpointed_iteration.txt").write_text("3")
    second = custom(corpus, tmp_path / "second", mine)
    second["checkpoint"]["load"] = str(middle)
    second["parallelism"] = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    second["training"] |= {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    for ours, theirs in zip(finished(second).steps, undisturbed.steps[3:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_missing_function_is_reported_in_one_line(config: dict[str, Any], mine: Path) -> None:
    config["model"]["layer_spec"] = f"{mine}/custom_layers.py:parallel_layer"
    ended = run(config)
    assert ended.statuses == (2,)
    assert "has no function parallel_layer; did you mean parallel_layers or ParallelLayer?" in ended.log
    assert "Traceback" not in ended.log
