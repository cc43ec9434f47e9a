"""The losses of the main output, compared with torch's own functions on the complete logits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.nn import functional

from tests.trainer.runs import DEEPSEEK, LLAMA, finished, gpt_config
from tests.trainer.single_rank import ON_CPU, resolved
from trainer.contract.config import TrainerConfig
from trainer.data.loader import MicroBatch
from trainer.loss import Objective
from trainer.model.build import build_model

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:.*:UserWarning:megatron", "ignore:.*:DeprecationWarning"),
    pytest.mark.usefixtures("mtp_losses"),
]


def microbatch(config: TrainerConfig) -> MicroBatch:
    """Two samples of random tokens, a third of which do not count."""
    random = torch.Generator().manual_seed(3)
    shape = 2, config.model.seq_length
    tokens, labels = (torch.randint(1000, shape, generator=random) for _ in range(2))
    return MicroBatch(
        tokens=tokens,
        labels=labels,
        loss_mask=(torch.rand(shape, generator=random) > 1 / 3).float(),
        position_ids=torch.arange(shape[1]).expand(shape),
        boundaries=None,
    )


def sums_and_gradients(
    config: TrainerConfig, groups: ProcessGroupCollection, batch: MicroBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The sums for the log, and the gradients by parameter, of the objective of `config`."""
    model = build_model(config, groups, ON_CPU)
    objective = Objective(config, model)
    [chunk] = model
    chunk.zero_grad_buffer()
    further = objective.begin(chunk, batch)
    losses = chunk(batch.tokens, batch.position_ids, None, labels=batch.labels, **further)
    total, _, sums = objective.of_microbatch(losses, batch, chunk)
    total.backward()
    return sums, {name: each.main_grad.clone() for name, each in chunk.named_parameters()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_z_loss_is_that_of_torch(
    precision: str, tmp_path: Path, process_groups: ProcessGroupCollection
) -> None:
    config = resolved(tmp_path, LLAMA, z_loss_coeff=0.01, precision=precision)
    batch = microbatch(config)
    sums, gradients = sums_and_gradients(config, process_groups, batch)
    [chunk] = build_model(config, process_groups, ON_CPU)
    chunk.zero_grad_buffer()
    logits = chunk(batch.tokens, batch.position_ids, None).float()
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


TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}


def curve(config: dict[str, Any], *names: str) -> list[list[float]]:
    """These columns of the steps of a run."""
    events = finished(config).events
    return [[event[name] for name in names] for event in events if event["event"] == "step"]


@pytest.mark.parametrize(
    "layout", [pytest.param(TP2 | {"sequence_parallel": True}, id="TP2+SP"), pytest.param(PP2, id="PP2")]
)
def test_the_z_loss_is_the_same_at_every_layout(layout: dict[str, Any], corpus: str, tmp_path: Path) -> None:
    curves = []
    for world_size, parallelism in ((1, {}), (2, layout)):
        config = gpt_config(corpus, tmp_path / str(world_size), LLAMA)
        config |= {"world_size": world_size, "parallelism": parallelism}
        config["training"] |= {"z_loss_coeff": 1e-2, "train_iters": 3}
        curves.append(curve(config, "loss", "output_z_loss", "grad_norm"))
    torch.testing.assert_close(torch.tensor(curves[1]), torch.tensor(curves[0]), rtol=0, atol=1e-4)
