"""AdamW against torch's, and the learning rate over a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer.runs import Run
from trainer import config as configuration
from trainer.config import ConfigError, TrainerConfig
from trainer.optimizer import FusedAdam, minimum_lr, warmup_iters


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


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"lr_warmup_iters": 7}, 7),
        ({"lr_warmup_fraction": 0.25}, 25),
        ({"lr_warmup_fraction": 0.25, "lr_decay_iters": 40}, 10),
        ({}, 10),  # a tenth of the run: 375M tokens would be more
        ({"lr_warmup_iters": 0}, 0),
    ],
)
def test_warm_up(optimizer: dict[str, Any], expected: int, config: dict[str, Any]) -> None:
    assert warmup_iters(parse(config, optimizer)) == expected


def test_a_warm_up_as_long_as_the_decay_is_an_error(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"warm-up of 100 .* 100"):
        warmup_iters(parse(config, {"lr_warmup_iters": 100}))


def parse(config: dict[str, Any], optimizer: dict[str, Any]) -> TrainerConfig:
    config["optimizer"] = {"lr": 1e-3} | optimizer
    config["training"]["train_iters"] = 100
    return configuration.from_dict(TrainerConfig, config, "test")


def test_the_rate_ends_at_a_tenth_unless_told_otherwise(config: dict[str, Any]) -> None:
    assert minimum_lr(parse(config, {}).optimizer) == pytest.approx(1e-4)
    assert minimum_lr(parse(config, {"min_lr": 0.0}).optimizer) == 0


def test_the_rate_of_a_run_rises_then_falls(single_gpt: Run) -> None:
    rates = [lr for *_, lr in single_gpt.steps]
    assert rates[0] == 0  # as in Megatron-LM, the first step of a warm-up starts from 0
    assert rates[1] == 1e-2
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] > 1e-3
