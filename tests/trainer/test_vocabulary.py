"""A run that starts from weights with fewer tokens, whose new rows are means of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.runs import GPT, LLAMA, Run, finished, gpt_config, run
from tests.trainer.tensors import load_all
from trainer.contract.files.checkpoint_files import iteration_directory

pytestmark = pytest.mark.process

BEFORE, AFTER = 1000, 1100
TIED, UNTIED = GPT, LLAMA
TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")


def starting(corpus: str, directory: Path, trained: Run, model: dict[str, Any]) -> dict[str, Any]:
    """A run of one step with a learning rate that rounds to nothing."""
    config = gpt_config(corpus, directory, model | {"vocab_size": AFTER})
    config["training"] |= {"train_iters": 1, "precision": "bf16"}
    config["optimizer"] = {"lr": 1e-30, "lr_warmup_iters": 0}
    config["checkpoint"] = {"load": str(trained.checkpoints), "finetune": True, "resize_vocabulary": True}
    return config


def train(corpus: str, directory: Path, model: dict[str, Any]) -> Run:
    config = gpt_config(corpus, directory, model)
    config["training"] |= {"train_iters": 2, "precision": "bf16"}
    return finished(config)


@pytest.mark.parametrize(
    ("model", "layout", "world_size"),
    [
        (UNTIED, {"tensor_model_parallel_size": 2}, 2),
        (TIED, {"pipeline_model_parallel_size": 2}, 2),
        pytest.param(TIED, {}, 1, marks=pytest.mark.slow),
    ],
    ids=["untied-TP2", "tied-PP2", "tied"],
)
def test_new_rows_are_the_mean_of_the_others(
    model: dict[str, Any], layout: dict[str, Any], world_size: int, corpus: str, tmp_path: Path
) -> None:
    trained = train(corpus, tmp_path / "trained", model)
    config = starting(corpus, tmp_path / "run", trained, model)
    config |= {"parallelism": layout, "world_size": world_size}
    ended = finished(config)
    before = load_all(iteration_directory(trained.checkpoints, 2))
    after = load_all(iteration_directory(ended.checkpoints, 1))
    tables = [name for name in TABLES if name in before]
    assert len(tables) == (2 if model is UNTIED else 1)
    for name in before:
        if name in tables:
            assert (len(before[name]), len(after[name])) == (1024, 1152)
            old, mean = before[name][:BEFORE], before[name][:BEFORE].float().mean(0)
            torch.testing.assert_close(after[name][:BEFORE], old, rtol=0, atol=1e-20)
            for row in after[name][BEFORE:AFTER]:
                torch.testing.assert_close(row, mean.to(row.dtype), rtol=1e-2, atol=1e-6)
        elif not name.startswith("optimizer."):
            torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-20)
    for name in tables:  # the optimizer's fp32 weights begin with the new rows
        main = after[f"optimizer.state.param.{name}"]
        torch.testing.assert_close(main.to(torch.bfloat16), after[name], rtol=0, atol=1e-20)


def test_a_vocabulary_that_shrinks_or_is_not_confirmed_is_refused(corpus: str, tmp_path: Path) -> None:
    trained = train(corpus, tmp_path / "trained", UNTIED)
    config = starting(corpus, tmp_path / "run", trained, UNTIED)
    config["model"]["vocab_size"] = 800
    shrunk = run(config)
    assert shrunk.statuses == (2,)
    assert "model.padded_vocab_size: 1024 -> 896" in shrunk.log
    for count in (1010, AFTER):
        config["model"]["vocab_size"] = count
        config["checkpoint"]["resize_vocabulary"] = False
        refused = run(config)
        assert refused.statuses == (2,)
        assert "set checkpoint.resize_vocabulary: true" in refused.log
