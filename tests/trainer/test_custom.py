"""Layers and models of users: the examples at several layouts, and parts that would give other results."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.inference.models import build_chunk
from tests.trainer.runs import DEEPSEEK, LLAMA, MOE, ROOT, TWO_LAYERS, Run, finished, gpt_config, run
from trainer.contract.errors import TrainerError
from trainer.model.experts import Router

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("code_of_this_test")]

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
    config["training"]["train_iters"] = 4
    config["checkpoint"] = {"save_interval": 2}
    return config


def test_the_examples_resume_at_another_layout(
    corpus: str, mine: Path, single_llama: Run, tmp_path: Path
) -> None:
    first = custom(corpus, tmp_path / "first", mine)
    first["parallelism"] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    undisturbed = finished(first)
    assert undisturbed.steps[0][1] != pytest.approx(single_llama.steps[0][1], abs=1e-4)
    middle = tmp_path / "middle"
    shutil.copytree(undisturbed.checkpoints / "iter_0000002", middle / "iter_0000002")
    (middle / "latest_checkpointed_iteration.txt").write_text("2")
    second = custom(corpus, tmp_path / "second", mine)
    second["checkpoint"]["load"] = str(middle)
    second["parallelism"] = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    second["training"] |= {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    for ours, theirs in zip(finished(second).steps, undisturbed.steps[2:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_missing_function_is_reported_in_one_line(config: dict[str, Any], mine: Path) -> None:
    config["model"]["layer_spec"] = f"{mine}/custom_layers.py:parallel_layer"
    ended = run(config)
    assert ended.statuses == (2,)
    assert "has no function parallel_layer; did you mean ParallelLayer or parallel_layers?" in ended.log
    assert "Traceback" not in ended.log


OWN = """
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.moe.router import TopKRouter
from trainer.model import experts

class Derived(experts.Router):
    pass

class Other(TopKRouter):
    pass

def experts_of_core(core, vp_stage, usual):
    for layer in usual.layer_specs[1:]:
        whole = get_gpt_layer_local_spec(num_experts=core.num_moe_experts, normalization=core.normalization)
        layer.submodules.mlp = whole.submodules.mlp
    return usual

def corrected_experts(core, vp_stage, usual):
    changed = experts_of_core(core, vp_stage, usual)
    for layer in changed.layer_specs[1:]:
        experts.use_router(layer)
    return changed

def with_router(spec, router):
    for layer in spec.layer_specs:
        mlp = layer.submodules.mlp
        parts = mlp.keywords["submodules"] if hasattr(mlp, "keywords") else mlp.submodules
        parts.router = router
    return spec

def derived(core, vp_stage, usual):
    return with_router(usual, Derived)

def other(core, vp_stage, usual):
    return with_router(usual, Other)

class Model(GPTModel):
    def __init__(self, *, transformer_layer_spec, **arguments):
        super().__init__(transformer_layer_spec=with_router(transformer_layer_spec, TopKRouter), **arguments)

def divided_projections(core, vp_stage, usual):
    for layer in usual.layer_specs:
        parts = layer.submodules.self_attention.submodules
        parts.linear_kv_down_proj = ColumnParallelLinear
    return usual

def one_layer(core, vp_stage, usual):
    return usual.layer_specs[-1]
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A user's file with layers that have parts of Megatron-Core."""
    file = tmp_path_factory.mktemp("own") / "own_parts.py"
    file.write_text(OWN)
    return str(file)


def test_experts_of_core_are_refused_and_train_alike_with_the_trainers_router(
    corpus: str, own: str, tmp_path: Path
) -> None:
    runs = {}
    for function in (None, "experts_of_core", "corrected_experts"):
        model = MOE | TWO_LAYERS | {"layer_spec": function and f"{own}:{function}"}
        config = gpt_config(corpus, tmp_path / str(function), model)
        config["training"]["train_iters"] = 3
        runs[function] = run(config)
    refused = runs["experts_of_core"]
    assert refused.statuses == (2,)
    assert "decoder.layers.1.mlp.router is a TopKRouter, which is not derived from" in refused.log
    assert "Traceback" not in refused.log
    assert runs["corrected_experts"].steps == runs[None].steps != []


ALL_EXPERTS = MOE | {"moe_layer_freq": None}


@pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults
@pytest.mark.usefixtures("process_groups")
@pytest.mark.parametrize(
    ("key", "function", "name"),
    [("layer_spec", "other", "Other"), ("model_provider", "Model", "TopKRouter")],
)
def test_other_routers_are_refused(key: str, function: str, name: str, own: str) -> None:
    with pytest.raises(TrainerError, match=f"^decoder.layers.0.mlp.router is a {name}, which is not derived"):
        build_chunk(ALL_EXPERTS | {key: f"{own}:{function}"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("process_groups")
def test_a_router_derived_from_the_trainers_is_accepted(own: str) -> None:
    _, chunk = build_chunk(ALL_EXPERTS | {"layer_spec": f"{own}:derived"})
    routers = [module for module in chunk.modules() if isinstance(module, Router)]
    assert [type(router).__name__ for router in routers] == ["Derived"] * 4


def test_divided_down_projections_are_refused(corpus: str, own: str, tmp_path: Path) -> None:
    model = DEEPSEEK | {"layer_spec": f"{own}:divided_projections"}
    config = gpt_config(corpus, tmp_path, model) | {
        "world_size": 2,
        "parallelism": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    }
    ended = run(config)
    assert ended.statuses == (2, 2)
    part = "decoder.layers.0.self_attention.linear_kv_down_proj is a ColumnParallelLinear with 14 of 28 rows"
    assert part in ended.log


def test_one_spec_is_for_all_layers_and_those_of_mtp(corpus: str, own: str, tmp_path: Path) -> None:
    model = LLAMA | {"num_layers": 2, "mtp_num_layers": 1}
    usual = gpt_config(corpus, tmp_path / "usual", model)
    same = gpt_config(corpus, tmp_path / "same", model | {"layer_spec": f"{own}:one_layer"})
    for config in (usual, same):
        config["training"]["train_iters"] = 2
    assert finished(same).steps == finished(usual).steps
