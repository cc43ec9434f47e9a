"""AdamW against torch's, and the learning rate over a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.runs import Run
from tests.trainer.single_rank import resolved
from tests.trainer.small_run import SMALL
from trainer import checkpoint
from trainer.contract.config import OptimizerConfig
from trainer.contract.model.batch_size import Batch
from trainer.contract.optimizers import OPTIMIZERS
from trainer.contract.optimizers.adamw import AdamW
from trainer.data.blend import Blend
from trainer.data.datasets import Reading
from trainer.data.loader import data_iterators
from trainer.metrics.console import Log
from trainer.optimizer.adamw import FusedAdam
from trainer.optimizer.build import PARTS
from trainer.step import TrainingState, Vote, train_step
from trainer.train import build_state
from trainer.trials.samples import RandomSamples


def test_the_trainer_builds_each_optimizer_with_its_keys() -> None:
    assert set(PARTS) == set(OPTIMIZERS)
    section = OptimizerConfig(lr=1e-3)
    for optimizer, parts in PARTS.items():
        assert set(optimizer.keys) <= parts.core_arguments(section).keys()


@pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults
def test_a_replicated_optimizer_continues_from_its_checkpoint(
    process_groups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No optimizer of the trainer is replicated so far, so AdamW takes part as if it were."""
    monkeypatch.setattr(AdamW, "sharding", "replicated")
    config = resolved(tmp_path, SMALL, precision="bf16")
    log, directory = Log(is_rank_0=False, progress=False), tmp_path / "checkpoints"
    directory.mkdir()

    def step(state: TrainingState) -> float:
        state.scheduler.step(0)
        plan = [Batch(state.consumed_samples, config.training.global_batch_size)]
        batches = data_iterators(state.model, RandomSamples(config, 500), config, process_groups, plan)
        return train_step(state, batches, config, process_groups, Vote).loss

    state = build_state(config, process_groups, log)
    assert not state.model[0].ddp_config.use_distributed_optimizer
    for _ in range(2):
        step(state)
    reading = Reading((Blend("train", 0, ()),), None, 0)
    checkpoints = checkpoint.Checkpoints(
        directory, config, process_groups, log, lambda *_: None, lambda: None, {}, reading
    )
    checkpoints.save(state, wait=True)
    source = checkpoint.find(directory, config, {}, log, lambda: None)
    assert source is not None
    resumed = build_state(config, process_groups, log)
    checkpoint.load(source, resumed, process_groups)
    assert [step(resumed) for _ in range(2)] == [step(state) for _ in range(2)]


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
