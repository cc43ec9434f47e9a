"""Every layout trains the same model, with the losses and gradient norms of a single process from the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.trainer.runs import LLAMA, QWEN, Run, finished

pytestmark = pytest.mark.process

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
INSTANCES = {"num_distributed_optimizer_instances": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def train_at(
    layout: dict[str, Any], world_size: int, config: dict[str, Any], **training: Any
) -> list[tuple[float, ...]]:
    config["world_size"] = world_size
    config["parallelism"] = layout
    if world_size == 4:
        config["training"]["micro_batch_size"] = 1
    config["training"] |= training
    return finished(config).steps


def assert_same_curve(steps: list[tuple[float, ...]], reference: Run) -> None:
    numpy.testing.assert_allclose(steps, reference.steps, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param(TP2 | PP2, 4, id="TP2xPP2", marks=pytest.mark.slow),
        pytest.param(TP2 | {"sequence_parallel": True}, 2, id="TP2+SP", marks=pytest.mark.slow),
        pytest.param(VPP2, 2, id="VPP2", marks=pytest.mark.slow),
        pytest.param(VPP2 | {"pipeline_model_parallel_layout": "Ett|t|t|L"}, 2, id="VPP2-layout"),
        pytest.param(
            PP2 | {"num_layers_in_first_pipeline_stage": 1}, 2, id="PP2-first", marks=pytest.mark.slow
        ),
        pytest.param(
            PP2 | {"pipeline_model_parallel_layout": "E|t*4L"}, 2, id="PP2-E", marks=pytest.mark.slow
        ),
        pytest.param(CP2, 2, id="CP2", marks=pytest.mark.slow),
        pytest.param(TP2 | CP2, 4, id="TP2xCP2", marks=pytest.mark.slow),
        pytest.param(PP2 | CP2, 4, id="PP2xCP2", marks=pytest.mark.slow),
        pytest.param(PP2 | OVERLAP, 4, id="PP2xDP2+overlap", marks=pytest.mark.slow),
        pytest.param(OVERLAP | INSTANCES, 2, id="DP2+instances", marks=pytest.mark.slow),
        pytest.param(PP2 | CP2 | INSTANCES, 4, id="PP2xCP2+instances", marks=pytest.mark.slow),
        pytest.param(PP2 | OVERLAP | INSTANCES, 4, id="PP2xDP2+overlap+instances"),
        pytest.param(VPP2 | OVERLAP | INSTANCES, 4, id="VPP2xDP2+overlap+instances", marks=pytest.mark.slow),
    ],
)
def test_a_gpt_trains_alike_at_every_layout(
    layout: dict[str, Any], world_size: int, config: dict[str, Any], single_gpt: Run
) -> None:
    assert_same_curve(train_at(layout, world_size, config), single_gpt)


def test_evaluations_and_saves_between_overlapped_steps_change_nothing(
    config: dict[str, Any], single_gpt: Run, tmp_path: Path
) -> None:
    """An evaluation between overlapped steps must see gathered parameters. A step starts gathering them again."""
    config["training"] |= {"eval_iters": 1, "eval_interval": 2}
    alone = finished(config).evaluations
    config |= {"world_size": 4, "parallelism": PP2 | OVERLAP, "run_dir": str(tmp_path / "overlapped")}
    config["checkpoint"] = {"save_interval": 3}
    together = finished(config)
    assert_same_curve(together.steps, single_gpt)
    assert [each[:2] for each in together.evaluations] == [each[:2] for each in alone]
    numpy.testing.assert_allclose(
        [each[2] for each in together.evaluations], [each[2] for each in alone], atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param(TP2 | {"sequence_parallel": True}, 2, id="TP2+SP"),
        pytest.param(CP2, 2, id="CP2"),
        pytest.param(PP2, 2, id="PP2"),
    ],
)
def test_a_llama_shape_trains_alike_at_every_layout(
    layout: dict[str, Any], world_size: int, config: dict[str, Any], single_llama: Run
) -> None:
    config["model"] = LLAMA
    assert_same_curve(train_at(layout, world_size, config), single_llama)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param(TP2, 2, id="TP2"),
        pytest.param(CP2, 2, id="CP2", marks=pytest.mark.slow),
        pytest.param(PP2, 2, id="PP2", marks=pytest.mark.slow),
        pytest.param(TP2 | {"sequence_parallel": True}, 2, id="TP2+SP", marks=pytest.mark.slow),
        pytest.param(TP2 | CP2, 4, id="TP2xCP2", marks=pytest.mark.slow),
    ],
)
def test_a_qwen_shape_trains_alike_at_every_layout(
    layout: dict[str, Any], world_size: int, config: dict[str, Any], single_qwen: Run, single_llama: Run
) -> None:
    config["model"] = QWEN
    assert_same_curve(train_at(layout, world_size, config), single_qwen)
    assert abs(single_qwen.steps[0][1] - single_llama.steps[0][1]) > 1e-3


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param({"recompute_granularity": "selective"}, id="selective", marks=pytest.mark.slow),
        pytest.param(
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
            id="full",
            marks=pytest.mark.slow,  # test_mtp_documents.py
        ),
    ],
)
def test_recomputation_changes_no_number(
    recompute: dict[str, Any], config: dict[str, Any], single_gpt: Run
) -> None:
    assert train_at({}, 1, config, **recompute) == single_gpt.steps


@pytest.mark.parametrize(
    ("layout", "world_size"), [({}, 1), pytest.param(TP2 | CP2, 4, id="TP2xCP2", marks=pytest.mark.slow)]
)
def test_recomputation_of_modules_changes_no_number(
    layout: dict[str, Any], world_size: int, config: dict[str, Any], single_llama: Run
) -> None:
    config["model"] = LLAMA
    modules = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
    assert_same_curve(train_at(layout, world_size, config, **modules), single_llama)


@pytest.mark.slow  # test_documents.py trains with larger microbatches
def test_micro_batches_change_only_rounding(config: dict[str, Any], single_gpt: Run) -> None:
    assert_same_curve(train_at({}, 1, config, micro_batch_size=4), single_gpt)


def test_bf16_follows_fp32(config: dict[str, Any], single_gpt: Run) -> None:
    steps = train_at({}, 1, config, precision="bf16")
    numpy.testing.assert_allclose(steps, single_gpt.steps, rtol=0.02)


def test_the_model_learns(single_gpt: Run) -> None:
    losses = [loss for _, loss, *_ in single_gpt.steps]
    assert losses[-1] < losses[0] - 0.3
