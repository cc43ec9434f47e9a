"""Parameters that training.freeze names keep their weights, and the others train alike at every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.trainer.runs import GPT, LLAMA, MOE, TWO_LAYERS, Run, finished, gpt_config, run
from tests.trainer.tensors import assert_predicted_size, assert_same_checkpoint, load_all
from trainer.contract.files.checkpoint_files import iteration_directory

pytestmark = pytest.mark.process

FIRST_STAGE = ["embedding.*", "decoder.layers.[01].*"]
"""All parameters of the first of two stages, and the last stage's copy of the embedding."""

PP2 = {"pipeline_model_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.fixture(scope="module")
def alone(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A GPT whose first half is frozen, on one rank."""
    return finished(frozen_config(corpus, tmp_path_factory.mktemp("alone"), FIRST_STAGE))


def frozen_config(
    corpus: str, directory: Path, freeze: list[str], model: dict[str, Any] = GPT, **training: Any
) -> dict[str, Any]:
    config = gpt_config(corpus, directory, model) | {"checkpoint": {"save_interval": 1}}
    config["training"] |= {"freeze": freeze, "train_iters": 4, **training}
    return config


def at(iteration: int, ended: Run) -> dict[str, torch.Tensor]:
    return load_all(iteration_directory(ended.checkpoints, iteration))


def changed(ended: Run) -> set[str]:
    """Names of the model's tensors that the steps after the first have changed."""
    first, last = at(1, ended), at(4, ended)
    assert first.keys() == last.keys()
    return {name for name in first if not torch.equal(first[name], last[name])}


def assert_same_curve(ended: Run, reference: Run) -> None:
    numpy.testing.assert_allclose(ended.steps, reference.steps, rtol=0, atol=1e-4)


def test_frozen_parameters_keep_their_weights_and_have_no_state(alone: Run) -> None:
    tensors = at(4, alone)
    frozen = {name for name in tensors if name.startswith("embedding.")}
    assert frozen
    trained = changed(alone)
    assert not trained & frozen
    states = {name for name in tensors if name.startswith("optimizer.state.")}
    assert not [name for name in states if "embedding" in name]
    assert_predicted_size(alone.directory, 4)
    # A tensor of a checkpoint has all layers; two of four are frozen.
    weight = "decoder.layers.self_attention.linear_qkv.weight"
    first, last = at(1, alone)[weight], tensors[weight]
    assert torch.equal(first[:2], last[:2])
    assert not torch.equal(first[2], last[2])
    assert not torch.equal(first[3], last[3])


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param(PP2, 2, id="PP2", marks=pytest.mark.slow),
        pytest.param(PP2 | OVERLAP, 4, id="PP2xDP2+overlap"),
        pytest.param(PP2 | {"virtual_pipeline_model_parallel_size": 2}, 2, id="VPP2", marks=pytest.mark.slow),
        pytest.param(
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            2,
            id="TP2+SP",
            marks=pytest.mark.slow,
        ),
        pytest.param(OVERLAP, 2, id="DP2+overlap", marks=pytest.mark.slow),
    ],
)
def test_a_half_frozen_model_trains_alike_at_every_layout(
    layout: dict[str, Any], world_size: int, corpus: str, alone: Run, tmp_path: Path
) -> None:
    config = frozen_config(corpus, tmp_path / "run", FIRST_STAGE)
    config |= {"parallelism": layout, "world_size": world_size}
    if world_size == 4:
        config["training"]["micro_batch_size"] = 1
    ended = finished(config)
    assert_same_curve(ended, alone)
    assert changed(ended) == changed(alone)


@pytest.fixture(scope="module")
def without_recomputation(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A Llama with a frozen embedding."""
    return finished(frozen_config(corpus, tmp_path_factory.mktemp("usual"), ["embedding.*"], LLAMA))


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    ],
    ids=["full", "mlp"],
)
def test_recomputed_layers_after_frozen_embeddings_are_trained(
    recompute: dict[str, Any], without_recomputation: Run, corpus: str, tmp_path: Path
) -> None:
    ended = finished(frozen_config(corpus, tmp_path / "run", ["embedding.*"], LLAMA, **recompute))
    assert_same_curve(ended, without_recomputation)


EXPERTS_ONLY = ["embedding.*", "output_layer.*", "decoder.final*", "*norm*", "*self_attention*", "*router*"]
EXPERTS_ONLY += ["*.mlp.linear_fc?.*", "*shared_experts*"]


@pytest.mark.parametrize("freeze", [["*.experts.*"], EXPERTS_ONLY], ids=["experts", "others"])
def test_experts_are_frozen_or_trained_on_all_ranks(freeze: list[str], corpus: str, tmp_path: Path) -> None:
    shape = MOE | TWO_LAYERS
    usual = finished(frozen_config(corpus, tmp_path / "one", freeze, shape))
    config = frozen_config(corpus, tmp_path / "two", freeze, shape)
    config |= {"world_size": 2, "parallelism": {"expert_model_parallel_size": 2}}
    ended = finished(config)
    assert_same_curve(ended, usual)
    assert changed(ended) == changed(usual)


def test_experts_of_a_frozen_router_are_chosen_as_before(corpus: str, tmp_path: Path) -> None:
    """Core updates the biases of all routers, which decide like weights."""
    ended = finished(frozen_config(corpus, tmp_path / "run", ["decoder.layers.1.*"], MOE | TWO_LAYERS))
    assert not [name for name in changed(ended) if "router" in name]
    ended = finished(frozen_config(corpus, tmp_path / "trained", ["decoder.layers.0.*"], MOE | TWO_LAYERS))
    assert [name for name in changed(ended) if name.endswith("router.expert_bias")]


def test_a_resumed_run_continues_bit_for_bit(corpus: str, tmp_path: Path) -> None:
    config = frozen_config(corpus, tmp_path / "run", FIRST_STAGE, precision="bf16")
    usual = finished(config)
    config["checkpoint"]["load"] = str(iteration_directory(usual.checkpoints, 2))
    again = finished(config | {"run_dir": str(tmp_path / "again")})
    assert again.steps == usual.steps[2:]
    assert_same_checkpoint(*(iteration_directory(each.checkpoints, 4) for each in (usual, again)))
    split = {"run_dir": str(tmp_path / "split"), "world_size": 2, "parallelism": PP2}
    numpy.testing.assert_allclose(finished(config | split).steps, again.steps, rtol=0, atol=1e-3)


def test_a_resumed_run_does_not_train_other_parameters(corpus: str, alone: Run, tmp_path: Path) -> None:
    config = frozen_config(corpus, tmp_path / "run", ["embedding.*"])
    config["checkpoint"]["load"] = str(alone.checkpoints)
    refused = run(config)
    assert refused.statuses == (2,)
    assert 'training.freeze: ["embedding.*", "decoder.layers.[01].*"] -> ["embedding.*"]' in refused.log
    config["checkpoint"]["finetune"] = True
    assert changed(finished(config)) > changed(alone)


@pytest.mark.parametrize(
    ("freeze", "message"),
    [(["nothing.*"], "'nothing.*' matches no parameter. The model has"), (["*"], "nothing to train")],
)
def test_a_pattern_without_effect_is_refused_by_all_ranks(
    freeze: list[str], message: str, config: dict[str, Any]
) -> None:
    """The rules do not know the names in a model of the user, so that only the ranks can check them."""
    config["training"]["freeze"] = freeze
    config["model"]["model_provider"] = "megatron.core.models.gpt:GPTModel"
    config |= {"world_size": 2, "parallelism": PP2}
    ended = run(config)
    assert ended.statuses == (2, 2)
    assert message in ended.log
