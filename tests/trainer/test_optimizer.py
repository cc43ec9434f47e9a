"""AdamW against torch's, and the learning rate over a run."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.runs import Run
from trainer.contract.config import OptimizerConfig
from trainer.contract.optimizers import OPTIMIZERS
from trainer.optimizer.adamw import FusedAdam
from trainer.optimizer.build import PARTS


def test_the_trainer_builds_each_optimizer_with_its_keys() -> None:
    assert set(PARTS) == set(OPTIMIZERS)
    section = OptimizerConfig(lr=1e-3)
    for optimizer, parts in PARTS.items():
        assert set(optimizer.keys) <= parts.core_arguments(section).keys()


def test_the_stand_in_for_fused_adam_is_adamw() -> None:
    generator = torch.Generator().manual_seed(1)
    arguments = {"lr": 0.1, "weight_decay": 0.3, "betas": (0.9, 0.95), "eps": 1e-6}
    ours, theirs = (torch.nn.Parameter(torch.ones(7)) for _ in range(2))
    optimizers = FusedAdam([ours], **arguments), torch.optim.AdamW([theirs], **arguments)
    for _ in range(5):
        gradient = torch.randn(7, generator=generator)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.process
def test_the_rate_of_a_run_rises_then_falls(single_gpt: Run) -> None:
    rates = [lr for *_, lr in single_gpt.steps]
    assert rates[0] == 0  # as in Megatron-LM, the first step of a warm-up starts from 0
    assert rates[1] == 1e-2
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] > 1e-3
