"""The losses of the main output, compared with torch's own functions on the complete logits."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.nn import functional

from tests.trainer.losses import complete_logits, microbatch, sums_and_gradients
from tests.trainer.runs import DEEPSEEK, LLAMA, ROOT, Run, finished, gpt_config, run
from tests.trainer.single_rank import resolved
from trainer.contract.config import TrainerConfig
from trainer.contract.errors import Exit, TrainerError
from trainer.contract.files.metrics_columns import TAKEN
from trainer.data.microbatch import MicroBatch

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:.*:UserWarning:megatron", "ignore:.*:DeprecationWarning"),
    pytest.mark.usefixtures("code_of_this_test", "mtp_losses"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_z_loss_is_that_of_torch(
    precision: str, tmp_path: Path, process_groups: ProcessGroupCollection
) -> None:
    config = resolved(tmp_path, LLAMA, z_loss_coeff=0.01, precision=precision)
    batch = microbatch(config)
    sums, gradients = sums_and_gradients(config, process_groups, batch)
    chunk, logits = complete_logits(config, process_groups, batch)
    losses = functional.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
    z_losses = logits.logsumexp(-1).square()
    expected = [(each * batch.loss_mask).sum() for each in (losses, z_losses)]
    (expected[0] + 0.01 * expected[1]).backward()
    exact = {"rtol": 1e-5, "atol": 1e-5} if precision == "fp32" else {"rtol": 2e-2, "atol": 1e-1}
    torch.testing.assert_close(sums[[0, 2]], torch.stack(expected).detach(), rtol=1e-5, atol=1e-5)
    for name, parameter in chunk.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.main_grad, **exact)


def test_the_z_loss_of_a_model_with_mtp_layers_is_that_of_its_main_output(
    tmp_path: Path, process_groups: ProcessGroupCollection
) -> None:
    config = resolved(tmp_path, DEEPSEEK)
    batch = microbatch(config)
    without, plain = sums_and_gradients(config, process_groups, batch)
    config = resolved(tmp_path, DEEPSEEK, z_loss_coeff=0.01)
    found, gradients = sums_and_gradients(config, process_groups, batch)
    torch.testing.assert_close(found[: len(without)], without)
    assert found[-2] / found[-1] == pytest.approx(math.log(1024) ** 2, abs=4)
    changed = {name for name in plain if not torch.allclose(gradients[name], plain[name], rtol=1e-4)}
    assert "output_layer.weight" in {name.removeprefix("module.") for name in changed}
    assert not any("mtp" in name for name in changed)


OWN = ROOT / "tests" / "trainer" / "own_losses.py"
EXAMPLE = ROOT / "examples" / "custom_loss.py"
EVERYTHING = {
    "loss": f"{OWN}:Smoothed",
    "z_loss_coeff": 1e-2,
    "metrics": [f"{EXAMPLE}:accuracy", f"{OWN}:low_labels"],
    "train_iters": 3,
    "eval_interval": 3,
    "eval_iters": 2,
}
COLUMNS = ("loss", "objective", "likelihood", "uniform", "output_z_loss", "accuracy", "low_labels")


def reference(
    config: TrainerConfig, groups: ProcessGroupCollection, batch: MicroBatch
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Sums of COLUMNS and gradients, from torch's functions of the complete logits."""
    chunk, logits = complete_logits(config, groups, batch)
    mask, rows = batch.loss_mask, logits.transpose(1, 2)
    likelihood = functional.cross_entropy(rows, batch.labels, reduction="none")
    smoothed = functional.cross_entropy(rows, batch.labels, reduction="none", label_smoothing=0.1)
    z_loss = logits.logsumexp(-1).square()
    objective = smoothed + 1e-2 * z_loss
    hits = (logits.argmax(-1) == batch.labels) * mask
    low = ((batch.labels < 250) * mask).bool()
    (objective * mask).sum().backward()
    uniform = (smoothed - 0.9 * likelihood) / 0.1
    sums = [(each * mask).sum().item() for each in (likelihood, objective, likelihood, uniform, z_loss)]
    sums += [hits.sum().item(), torch.exp(-likelihood)[low].sum().item()]
    return sums, {name: each.main_grad.clone() for name, each in chunk.named_parameters()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_and_metrics_of_the_user_are_those_of_torch(
    precision: str, tmp_path: Path, process_groups: ProcessGroupCollection
) -> None:
    config = resolved(tmp_path, LLAMA, precision=precision, **EVERYTHING)
    batch = microbatch(config)
    sums, gradients = sums_and_gradients(config, process_groups, batch)
    expected, expected_gradients = reference(config, process_groups, batch)
    assert sums[::2].tolist() == pytest.approx(expected, rel=1e-5)
    assert sums[1:-2:2].tolist() == [batch.loss_mask.sum().item()] * 6
    assert sums[-1] == ((batch.labels < 250) * batch.loss_mask).sum()
    exact = {"rtol": 1e-4, "atol": 1e-4} if precision == "fp32" else {"rtol": 2e-2, "atol": 1e-1}
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], **exact)


def test_the_focal_loss_of_the_example_is_that_of_complete_logits(
    tmp_path: Path, process_groups: ProcessGroupCollection
) -> None:
    config = resolved(tmp_path, LLAMA, loss=f"{EXAMPLE}:focal")
    batch = microbatch(config)
    sums, gradients = sums_and_gradients(config, process_groups, batch)
    chunk, logits = complete_logits(config, process_groups, batch)
    losses = functional.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
    focal = ((1 - torch.exp(-losses)) ** 2 * losses * batch.loss_mask).sum()
    focal.backward()
    assert sums[2] == pytest.approx(focal.item(), rel=1e-5)
    for name, parameter in chunk.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.main_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("wrong_shape", "it is a tensor [] of torch.float32. It must be the loss of each token"),
        ("detached", "it returns losses that do not depend on the logits"),
        ("forgets_its_terms", "it returns the parts ['kl'], but its attribute terms is ()"),
        (
            "two_arguments",
            "two_arguments takes (logits, labels), but is called with (logits, labels, loss_mask,",
        ),
        ("NoCall", "NoCall is a class without __call__"),
    ],
)
def test_a_wrong_loss_is_refused_by_name(
    function: str, message: str, tmp_path: Path, process_groups: ProcessGroupCollection
) -> None:
    config = resolved(tmp_path, LLAMA, loss=f"{OWN}:{function}")
    with pytest.raises(TrainerError) as refused:
        sums_and_gradients(config, process_groups, microbatch(config))
    assert str(refused.value).startswith(f"training.loss = '{OWN}:{function}'")
    assert message in str(refused.value)


TP2 = {"tensor_model_parallel_size": 2}
SP = {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}


def trained(corpus: str, directory: Path, layout: dict[str, Any], world_size: int, **model: Any) -> Run:
    config = gpt_config(corpus, directory, LLAMA | model)
    config |= {"world_size": world_size, "parallelism": layout, "logging": {"log_interval": 2}}
    config["training"] |= EVERYTHING
    if world_size == 4:
        config["training"]["micro_batch_size"] = 1
    return finished(config)


def numbers(run: Run) -> tuple[list[list[float]], list[list[float]]]:
    """COLUMNS of the steps and of the evaluations, of which the last line of steps has no metrics."""
    steps = [each for each in run.events if each["event"] == "step"]
    evaluations = [each for each in run.events if each["event"] == "evaluation"]
    assert not {"accuracy", "low_labels"} & steps[-1].keys()  # of step 3, which no interval ends
    complete = [*steps[:-1], *evaluations]
    curve = [[each[name] for name in ("loss", "objective", "uniform", "grad_norm")] for each in steps]
    return curve, [[each[name] for name in COLUMNS] for each in complete]


@pytest.fixture(scope="module")
def single(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of one process with a loss, a z-loss and metrics."""
    return trained(corpus, tmp_path_factory.mktemp("own"), {}, 1)


MOE = {"num_moe_experts": 4, "moe_ffn_hidden_size": 48}


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param(TP2 | SP, 2, id="TP2+SP"),
        pytest.param(VPP2 | CP2, 4, id="VPP2xCP2"),
        pytest.param(TP2, 4, id="TP2xDP2", marks=pytest.mark.slow),
    ],
)
def test_losses_and_metrics_of_the_user_are_the_same_at_every_layout(
    layout: dict[str, Any], world_size: int, corpus: str, single: Run, tmp_path: Path
) -> None:
    for ours, theirs in zip(
        numbers(trained(corpus, tmp_path, layout, world_size)), numbers(single), strict=True
    ):
        numpy.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_losses_and_metrics_of_the_user_are_the_same_with_experts_on_two_ranks(
    corpus: str, tmp_path: Path
) -> None:
    alone = numbers(trained(corpus, tmp_path / "1", {}, 1, **MOE))
    for ours, theirs in zip(numbers(trained(corpus, tmp_path / "2", EP2, 2, **MOE)), alone, strict=True):
        numpy.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_a_run_shows_its_losses_and_metrics(single: Run) -> None:
    [start] = [each for each in single.events if each["event"] == "start"]
    assert start["losses"] == ["objective", "likelihood", "uniform", "output_z_loss"]
    assert start["metrics"] == ["accuracy", "low_labels"]
    assert re.search(r"iteration 2/3: loss \S+, objective \S+, .*, accuracy \d\.\d+, low_labels ", single.log)
    assert re.search(r"iteration 3: valid loss \S+, objective .*, accuracy ", single.log)
    lines = [each for each in single.events if each["event"] in ("step", "evaluation")]
    mine = {"likelihood", "uniform", "accuracy", "low_labels"}
    assert set().union(*lines) - mine <= TAKEN


def test_the_cross_entropy_as_a_loss_of_the_user_trains_as_without(
    corpus: str, single_llama: Run, tmp_path: Path
) -> None:
    config = gpt_config(corpus, tmp_path, LLAMA)
    config["training"]["loss"] = f"{OWN}:plain"
    ended = finished(config)
    numpy.testing.assert_allclose(ended.steps, single_llama.steps, rtol=1e-5, atol=1e-6)
    steps = [each for each in ended.events if each["event"] == "step"]
    assert [each["objective"] for each in steps] == pytest.approx([each["loss"] for each in steps], abs=1e-6)


def test_a_loss_that_is_not_finite_ends_the_run_by_name(corpus: str, tmp_path: Path) -> None:
    config = gpt_config(corpus, tmp_path, LLAMA)
    config["training"]["loss"] = f"{OWN}:not_a_number"
    ended = run(config)
    assert ended.statuses == (Exit.NOT_FINITE,)
    assert "the objective is nan at iteration 1" in ended.log
