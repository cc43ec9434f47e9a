"""Latent attention (MLA) and multi-token prediction (MTP): one curve at every layout, and the losses of each layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.trainer.runs import DEEPSEEK, DEEPSEEK_V3, LLAMA, Run, finished, gpt_config, run
from tests.trainer.tensors import assert_same_checkpoint

pytestmark = pytest.mark.process

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
PP3 = {"pipeline_model_parallel_size": 3}
CP2 = {"context_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}

ROUNDING = 5e-7
"""Largest relative difference in a run in fp32."""

STEPS = 3

LR = 1e-3
"""Rate at which training does not amplify rounding.

AdamW divides gradients by their size, so a gradient that is zero except for rounding moves its weight by a complete
learning rate, in either direction. At 1e-2, gradient norms of other seeds differ by up to 2.3e-6, also between a single
process and itself with another micro_batch_size. In fp64 they differ by 4e-16.
"""


@pytest.fixture
def config(config: dict[str, Any]) -> dict[str, Any]:
    """Three steps of a single process, at a rate that does not amplify rounding."""
    config["training"]["train_iters"] = STEPS
    config["optimizer"]["lr"] = LR
    return config


@pytest.fixture(scope="module")
def single_deepseek(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A configuration with latent attention and multi-token prediction, evaluated after two steps and at the end."""
    config = gpt_config(corpus, tmp_path_factory.mktemp("deepseek"), DEEPSEEK)
    config["training"] |= {"train_iters": STEPS, "eval_iters": 1, "eval_interval": 2}
    config["optimizer"]["lr"] = LR
    return finished(config)


@pytest.fixture(scope="module")
def single_deepseek_v3(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = gpt_config(corpus, tmp_path_factory.mktemp("deepseek-v3"), DEEPSEEK_V3)
    config["training"]["train_iters"] = STEPS
    config["optimizer"]["lr"] = LR
    return finished(config)


def numbers(result: Run) -> list[tuple[float, ...]]:
    """Main loss, losses of the MTP layers and gradient norm of each step."""
    names = ("loss", "mtp_1_loss", "mtp_2_loss", "grad_norm")
    return [tuple(event[name] for name in names) for event in result.events if event["event"] == "step"]


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param(TP2, 2, id="TP2", marks=pytest.mark.slow),
        pytest.param(PP2, 2, id="PP2", marks=pytest.mark.slow),
        pytest.param(CP2, 2, id="CP2", marks=pytest.mark.slow),
        pytest.param(PP2 | CP2, 4, id="PP2xCP2", marks=pytest.mark.slow),
        pytest.param(
            PP2 | {"pipeline_model_parallel_layout": "Ett|mmL"}, 2, id="PP2-layout", marks=pytest.mark.slow
        ),
        pytest.param(PP3 | {"pipeline_model_parallel_layout": "Et|tmm|L"}, 3, id="PP3-before-loss"),
    ],
)
def test_all_losses_and_norms_are_those_of_a_single_process(
    layout: dict[str, Any], world_size: int, config: dict[str, Any], single_deepseek: Run
) -> None:
    """Tests below train at TP2 and at PP2, and at CP2 with experts."""
    config |= {"model": DEEPSEEK, "world_size": world_size, "parallelism": layout}
    numpy.testing.assert_allclose(numbers(finished(config)), numbers(single_deepseek), rtol=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param(TP2 | VPP2, 4, id="TP2xVPP2"),
        pytest.param(PP2 | {"num_layers_in_first_pipeline_stage": 3}, 2, id="PP2-first"),
    ],
)
def test_four_layers_train_alike(layout: dict[str, Any], world_size: int, config: dict[str, Any]) -> None:
    config["model"] = DEEPSEEK | {"num_layers": 4}
    alone = finished(config)
    config |= {"world_size": world_size, "parallelism": layout, "run_dir": config["run_dir"] + "-2"}
    numpy.testing.assert_allclose(numbers(finished(config)), numbers(alone), rtol=ROUNDING)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        # test_resuming.py has a GPT with tied embeddings resume at PP2
        pytest.param(PP2, 2, id="PP2", marks=pytest.mark.slow),
        pytest.param(
            PP3
            | {
                "virtual_pipeline_model_parallel_size": 2,
                "pipeline_model_parallel_layout": "Et|t|t|t|mm|L",
            },
            3,
            id="PP3xVPP2-before-loss",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_tied_embeddings_in_pipelines(
    layout: dict[str, Any], world_size: int, config: dict[str, Any], tmp_path: Path
) -> None:
    """MTP layers and the output layer share a copy on the last stage, which Core does not save, or have one each."""
    config["model"] = LLAMA | {"mtp_num_layers": 2, "untie_embeddings_and_output_weights": False}
    config["training"]["global_batch_size"] = 6
    alone = finished(config)
    (tmp_path / "stop").touch()
    config |= {"world_size": world_size, "parallelism": layout, "run_dir": config["run_dir"] + "-2"}
    finished(config, "--stop-file", str(tmp_path / "stop"))
    resumed = finished(config)
    numpy.testing.assert_allclose(numbers(resumed), numbers(alone), rtol=ROUNDING)
    config["run_dir"] += "-uninterrupted"
    whole = finished(config)
    assert numbers(resumed) == numbers(whole)
    assert_same_checkpoint(resumed.checkpoints / "iter_0000003", whole.checkpoints / "iter_0000003")


@pytest.mark.parametrize(
    "queries",
    [{"q_lora_rank": None}, pytest.param({"qk_layernorm": False}, marks=pytest.mark.slow)],
    ids=str,
)
def test_latent_attention_without_a_latent_for_queries_or_without_norms(
    queries: dict[str, Any], config: dict[str, Any], single_deepseek: Run
) -> None:
    config["model"] = DEEPSEEK | {"mtp_num_layers": None} | queries
    alone = finished(config)
    config |= {"world_size": 2, "parallelism": TP2, "run_dir": config["run_dir"] + "-2"}
    numpy.testing.assert_allclose(finished(config).steps, alone.steps, rtol=ROUNDING)
    assert abs(alone.steps[0][1] - single_deepseek.steps[0][1]) > 1e-5


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param(TP2 | EP2, 2, id="TP2xEP2", marks=pytest.mark.slow),
        pytest.param(CP2 | EP2, 2, id="CP2xEP2"),
        pytest.param(PP2 | EP2, 4, id="PP2xEP2", marks=pytest.mark.slow),
    ],
)
def test_experts_in_all_kinds_of_layers(
    layout: dict[str, Any], world_size: int, config: dict[str, Any], single_deepseek_v3: Run
) -> None:
    config |= {"model": DEEPSEEK_V3, "world_size": world_size, "parallelism": layout}
    numpy.testing.assert_allclose(numbers(finished(config)), numbers(single_deepseek_v3), rtol=ROUNDING)


def test_layers_without_weight_in_the_loss_change_nothing(config: dict[str, Any]) -> None:
    """The logged loss is the main loss, and the MTP layers do not change the other weights or their gradients."""
    config["model"] = LLAMA
    without = finished(config)
    config["run_dir"] += "-2"
    config["model"] = LLAMA | {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.0}
    result = finished(config)
    numpy.testing.assert_allclose(result.steps, without.steps, rtol=ROUNDING)
    losses = [event["mtp_1_loss"] for event in result.events if event["event"] == "step"]
    assert 6.5 < losses[0] < 7.5  # ln(1024 rows) is 6.9
    assert f", mtp_1_loss {losses[0]:.4f}, grad norm" in result.log


def test_a_run_resumes_bit_by_bit(config: dict[str, Any], single_deepseek: Run, tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    config["model"] = DEEPSEEK
    config["training"] |= {"eval_iters": 1, "eval_interval": 2}
    first = finished(config, "--stop-file", str(tmp_path / "stop"))
    assert numbers(first) == numbers(single_deepseek)[:1]
    second = finished(config)
    assert numbers(second) == numbers(single_deepseek)
    assert second.evaluations == single_deepseek.evaluations
    assert_same_checkpoint(second.checkpoints / "iter_0000003", single_deepseek.checkpoints / "iter_0000003")


@pytest.mark.slow  # test_resuming.py has a GPT do this
def test_a_checkpoint_continues_at_another_layout(
    config: dict[str, Any], single_deepseek: Run, tmp_path: Any
) -> None:
    (tmp_path / "stop").touch()
    config |= {"model": DEEPSEEK, "world_size": 2, "parallelism": PP2}
    finished(config, "--stop-file", str(tmp_path / "stop"))
    config["parallelism"] = TP2
    numpy.testing.assert_allclose(numbers(finished(config)), numbers(single_deepseek), rtol=ROUNDING)


def test_a_layout_with_incomplete_gradients_is_refused(config: dict[str, Any]) -> None:
    """Otherwise, the ranks would train different weights, with a gradient norm that is 0.05% off."""
    config |= {"model": DEEPSEEK, "world_size": 2, "parallelism": {"tensor_model_parallel_size": 2}}
    result = run(config)
    assert 0 not in result.statuses
    message = "sequence_parallel = false must be true for model.multi_latent_attention with TP = 2"
    assert message in result.log


def test_fine_tuning_without_the_mtp_layers_of_the_checkpoint(
    config: dict[str, Any], single_deepseek: Run
) -> None:
    """Its first loss is that of fine-tuning with them, and its run has the weights of the other layers."""
    config["checkpoint"] = {"load": str(single_deepseek.checkpoints), "finetune": True}
    config["model"] = DEEPSEEK
    config["training"]["train_iters"] = 1
    config["optimizer"]["lr_warmup_iters"] = 0
    with_mtp = finished(config)
    config["model"] = DEEPSEEK | {"mtp_num_layers": None}
    config["run_dir"] += "-2"
    without = finished(config)
    assert without.steps[0][1] == with_mtp.steps[0][1]
    assert without.steps[0][1] < single_deepseek.steps[0][1]
