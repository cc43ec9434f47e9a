"""The moving average of the weights follows its formula, at every layout and over resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.runs import LLAMA, Run, finished, gpt_config
from tests.trainer.tensors import assert_predicted_size, assert_same_checkpoint, load_all
from trainer.contract.errors import TrainerError
from trainer.contract.files.checkpoint_files import iteration_directory
from trainer.huggingface.averaging import write_moving_average

pytestmark = pytest.mark.process

DECAY = 0.75
WEIGHT, AVERAGE = "optimizer.state.param.", "optimizer.state.ema."


def averaging(corpus: str, directory: Path, **changes: Any) -> dict[str, Any]:
    config = gpt_config(corpus, directory, LLAMA) | {"checkpoint": {"save_interval": 1}, **changes}
    config["training"] |= {"ema_decay": DECAY, "train_iters": 4, "precision": "bf16"}
    return config


def at(iteration: int, ended: Run) -> dict[str, torch.Tensor]:
    return load_all(iteration_directory(ended.checkpoints, iteration))


@pytest.fixture(scope="module")
def alone(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(averaging(corpus, tmp_path_factory.mktemp("alone")))


def test_the_average_follows_its_formula(alone: Run) -> None:
    averages = {name: tensor for name, tensor in at(1, alone).items() if name.startswith(AVERAGE)}
    assert "optimizer.state.ema.decoder.layers.mlp.linear_fc1.weight" in averages
    for iteration in (2, 3, 4):
        tensors = at(iteration, alone)
        for name, average in averages.items():
            weight = tensors[name.replace(AVERAGE, WEIGHT)]
            expected = DECAY * average + (1 - DECAY) * weight
            torch.testing.assert_close(tensors[name], expected, rtol=1e-6, atol=1e-8)
            assert tensors[name].dtype == torch.float32
        averages = {name: tensors[name] for name in averages}


def test_the_average_becomes_a_checkpoint_with_weights(corpus: str, alone: Run, tmp_path: Path) -> None:
    """Also if some layers are frozen, whose weights are kept."""
    config = averaging(corpus, tmp_path / "run")
    config["training"]["freeze"] = ["embedding.*", "decoder.layers.[01].*"]
    for ended in (alone, finished(config)):
        assert_predicted_size(ended.directory, 4)
        destination = tmp_path / f"ema-{ended.directory.name}"
        write_moving_average(ended.directory, destination, print)
        tensors, source = load_all(destination / "iter_0000004"), at(4, ended)
        assert tensors.keys() == {name for name in source if not name.startswith("optimizer.")}
        for name, tensor in tensors.items():
            expected = source[name].clone()
            if (average := source.get(AVERAGE + name)) is not None:
                expected = average.to(tensor.dtype)
            for layer in range(4):
                average = source.get(AVERAGE + name.replace(".layers.", f".layers.{layer}."))
                if ".layers." in name and average is not None:
                    expected[layer] = average.to(tensor.dtype)
            assert torch.equal(tensor, expected), name
        changed = [name for name, tensor in tensors.items() if not torch.equal(tensor, source[name])]
        assert "output_layer.weight" in changed
        assert ("embedding.word_embeddings.weight" in changed) is (ended is alone)
    with pytest.raises(TrainerError, match="has only weights, and no moving average"):
        write_moving_average(destination, tmp_path / "again", print)


def test_a_resumed_run_continues_the_average_bit_for_bit(corpus: str, alone: Run, tmp_path: Path) -> None:
    config = averaging(corpus, tmp_path / "run")
    config["checkpoint"]["load"] = str(iteration_directory(alone.checkpoints, 2))
    again = finished(config)
    assert_same_checkpoint(*(iteration_directory(each.checkpoints, 4) for each in (alone, again)))


def test_another_layout_continues_the_average(corpus: str, alone: Run, tmp_path: Path) -> None:
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    config = averaging(corpus, tmp_path / "run", parallelism=layout, world_size=4)
    config["training"]["micro_batch_size"] = 1
    config["checkpoint"]["load"] = str(iteration_directory(alone.checkpoints, 4))
    config["training"]["train_iters"] = 5
    config["optimizer"] |= {"lr_decay_iters": 4}
    before, after = at(4, alone), load_all(iteration_directory(finished(config).checkpoints, 5))
    for name in (each for each in before if each.startswith(AVERAGE)):
        expected = DECAY * before[name] + (1 - DECAY) * after[name.replace(AVERAGE, WEIGHT)]
        torch.testing.assert_close(after[name], expected, rtol=1e-6, atol=1e-8)


def test_an_average_begins_with_the_weights_of_a_checkpoint_without_one(
    corpus: str, alone: Run, tmp_path: Path
) -> None:
    plain = averaging(corpus, tmp_path / "plain")
    del plain["training"]["ema_decay"]
    before = at(4, finished(plain))
    assert torch.equal(before["output_layer.weight"], at(4, alone)["output_layer.weight"])
    config = averaging(corpus, tmp_path / "run")
    config["training"]["train_iters"] = 5
    config["optimizer"] |= {"lr_decay_iters": 4}
    config["checkpoint"] |= {"load": str(tmp_path / "plain/checkpoints"), "changed": ["training.ema_decay"]}
    after = load_all(iteration_directory(finished(config).checkpoints, 5))
    for name in (each for each in after if each.startswith(AVERAGE)):
        weight = name.replace(AVERAGE, WEIGHT)
        expected = DECAY * before[weight] + (1 - DECAY) * after[weight]
        torch.testing.assert_close(after[name], expected, rtol=1e-6, atol=1e-8)
