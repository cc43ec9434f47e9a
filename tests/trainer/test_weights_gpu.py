"""Frozen weights, their moving average and the best checkpoint on real GPUs (make test-gpu)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.trainer.runs import LLAMA, MOE, Run, finished, write_corpus
from tests.trainer.tensors import assert_same_checkpoint, load_all
from tests.trainer.test_gpu import EP2, OVERLAP, PP2, TP2_SP, needs_gpus, on_gpus
from tests.trainer.test_weight_average import AVERAGE, DECAY, WEIGHT
from trainer.contract.files.checkpoint_files import iteration_directory
from trainer.huggingface.averaging import write_moving_average

FIRST_HALF = ["embedding.*", "decoder.layers.[01].*"]
LOSS_TOLERANCE, NORM_TOLERANCE = 0.01, 0.05
"""Tolerances of other layouts in bf16: absolute for losses, relative for gradient norms."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "long", documents=400)


@pytest.fixture(scope="module")
def alone(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A Llama whose first half is frozen, with an average of the other half, on one GPU."""
    return finished(saving(corpus, tmp_path_factory.mktemp("alone")))


def saving(corpus: str, directory: Path, model: dict[str, Any] = LLAMA, **training: Any) -> dict[str, Any]:
    """Four steps with a checkpoint of each."""
    config = on_gpus(corpus, directory, 1, {}, model) | {"checkpoint": {"save_interval": 1}}
    config["training"] |= {"train_iters": 4, "deterministic_mode": True, "micro_batch_size": 2}
    config["training"] |= {"freeze": FIRST_HALF, "ema_decay": DECAY, **training}
    return config


def at(iteration: int, run: Run) -> dict[str, torch.Tensor]:
    return load_all(iteration_directory(run.checkpoints, iteration))


def changed(run: Run) -> set[str]:
    first, last = at(1, run), at(4, run)
    return {name for name, tensor in first.items() if not torch.equal(tensor, last[name])}


def assert_average_follows_its_formula(run: Run) -> None:
    averages = {name: tensor for name, tensor in at(1, run).items() if name.startswith(AVERAGE)}
    assert averages
    for iteration in (2, 3, 4):
        tensors = at(iteration, run)
        for name, average in averages.items():
            expected = DECAY * average + (1 - DECAY) * tensors[name.replace(AVERAGE, WEIGHT)]
            torch.testing.assert_close(tensors[name], expected, rtol=1e-6, atol=1e-8)
        averages = {name: tensors[name] for name in averages}


def test_frozen_weights_stay_and_others_are_averaged(alone: Run, tmp_path: Path) -> None:
    first, last = at(1, alone), at(4, alone)
    weight = "decoder.layers.self_attention.linear_qkv.weight"
    assert torch.equal(first[weight][:2], last[weight][:2])
    assert not torch.equal(first[weight][2], last[weight][2])
    assert not [name for name in changed(alone) if "embedding" in name]
    assert not [name for name in last if name.startswith("optimizer.state.") and "embedding" in name]
    assert_average_follows_its_formula(alone)
    write_moving_average(alone.directory, tmp_path / "average", print)
    written = load_all(tmp_path / "average/iter_0000004")
    average = last[f"{AVERAGE}output_layer.weight"]
    assert torch.equal(written["output_layer.weight"], average.to(torch.bfloat16))


def test_a_resume_continues_bit_for_bit(corpus: str, alone: Run, tmp_path: Path) -> None:
    config = saving(corpus, tmp_path / "run")
    config["checkpoint"]["load"] = str(iteration_directory(alone.checkpoints, 2))
    again = finished(config)
    assert again.steps == alone.steps[2:]
    assert_same_checkpoint(*(iteration_directory(each.checkpoints, 4) for each in (alone, again)))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(PP2 | OVERLAP, id="PP2"),
        pytest.param(TP2_SP, id="TP2+SP"),
        pytest.param(OVERLAP, id="DP2+overlap"),
    ],
)
@needs_gpus(2)
def test_two_gpus_freeze_and_average_alike(
    layout: dict[str, Any], corpus: str, alone: Run, tmp_path: Path
) -> None:
    """Both start from the same weights."""
    config = saving(corpus, tmp_path / "run") | {"parallelism": layout, "world_size": 2}
    config["checkpoint"]["load"] = str(iteration_directory(alone.checkpoints, 1))
    run = finished(config)
    assert_same_curve(run, alone.steps[1:])
    assert torch.equal(
        at(4, run)["embedding.word_embeddings.weight"], at(4, alone)["embedding.word_embeddings.weight"]
    )
    averages = at(2, run)
    for name, average in ((name, each) for name, each in at(1, alone).items() if name.startswith(AVERAGE)):
        expected = DECAY * average + (1 - DECAY) * averages[name.replace(AVERAGE, WEIGHT)]
        torch.testing.assert_close(averages[name], expected, rtol=1e-6, atol=1e-8)


def assert_same_curve(run: Run, steps: list[tuple[int, float, float, float]]) -> None:
    found, expected = numpy.array(run.steps), numpy.array(steps)
    numpy.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=0, atol=LOSS_TOLERANCE)
    numpy.testing.assert_allclose(found[:, 2], expected[:, 2], rtol=NORM_TOLERANCE)


@pytest.mark.parametrize("freeze", [["*.experts.*"], ["embedding.*", "*self_attention*", "*router*"]])
@needs_gpus(2)
def test_experts_are_frozen_or_trained_on_both_gpus(freeze: list[str], corpus: str, tmp_path: Path) -> None:
    """In grouped matrix products, whose weights are many parameters."""
    one = finished(saving(corpus, tmp_path / "one", MOE, freeze=freeze))
    config = saving(corpus, tmp_path / "two", MOE, freeze=freeze) | {"parallelism": EP2, "world_size": 2}
    config["checkpoint"]["load"] = str(iteration_directory(one.checkpoints, 1))
    two = finished(config)
    assert_same_curve(two, one.steps[1:])
    before, after = at(1, one), at(4, two)
    experts = {name for name in before if ".experts." in name and "shared" not in name}
    frozen = {name for name in experts & after.keys() if not name.startswith("optimizer.")}
    assert frozen
    for name in frozen:
        assert torch.equal(before[name], after[name]) is (freeze == ["*.experts.*"]), name


def test_a_run_ends_when_it_no_longer_improves_and_keeps_its_best(corpus: str, tmp_path: Path) -> None:
    """It learns tokens that its validation set does not have."""
    other = write_corpus(tmp_path / "other", documents=120, first_token=500)
    config = on_gpus(corpus, tmp_path / "run", 1, {}, LLAMA)
    config["data"] = {"train": [{"prefix": corpus}], "valid": [{"prefix": other}], "num_workers": 0}
    config["training"] |= {"train_iters": 40, "eval_interval": 2, "eval_iters": 1, "deterministic_mode": True}
    config["training"]["early_stopping"] = {"patience": 3}
    config["optimizer"]["lr_decay_iters"] = 40
    config["checkpoint"] = {"save_interval": 5, "keep_last": 1, "keep_best": True}
    run = finished(config)
    losses = [(loss, iteration) for iteration, split, loss in run.evaluations if split == "valid"]
    best, end = min(losses)[1], losses[-1][1]
    assert end == best + 6 < 40
    assert sorted(path.name for path in run.checkpoints.glob("iter_*")) == [
        f"iter_{best:07}",
        f"iter_{end:07}",
    ]
    assert f"stopped early at iteration {end}" in (run.directory / "DONE").read_text()
    interrupted = copy.deepcopy(config) | {"run_dir": str(tmp_path / "interrupted")}
    interrupted["training"]["train_iters"] = end - 1
    finished(interrupted)
    resumed = finished(copy.deepcopy(config) | {"run_dir": str(tmp_path / "interrupted")})
    assert (resumed.steps, resumed.evaluations[-1]) == (run.steps, run.evaluations[-1])
