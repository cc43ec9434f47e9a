"""Random runs: one curve at every layout, exact resumption in every precision, and continuation at another layout.

Larger layouts are only built, on fake worlds. `make test-random SEEDS="17 18"` runs the cases of these seeds. A failed
test prints its case as JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.trainer.random_runs import SAVED, STEPS, Case, draw
from tests.trainer.runs import Run, finished
from tests.trainer.tensors import assert_same_checkpoint
from trainer.contract import config as configuration
from trainer.contract.config import TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.rules.engine import require
from trainer.distributed import groups
from trainer.distributed.rendezvous import Ranks
from trainer.model import kernels
from trainer.model.build import build_model
from trainer.optimizer.build import build_optimizer

pytestmark = pytest.mark.slow

SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "").split()] or [*range(6)]
ROUNDING, ROUNDING_OF_LATENTS = 5e-7, 1e-6
"""Largest relative difference of a loss or gradient norm in fp32, without and with latent attention."""


@pytest.mark.process
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_run(seed: int, tmp_path: Path) -> None:
    case = draw(seed, tmp_path)
    print(json.dumps(dataclasses.asdict(case)))
    here, there = case.layouts
    alone = finished(case.config("alone", {}))
    straight = finished(case.config("straight", here))
    assert_same_curve(case, straight, alone)
    assert_same_evaluations(straight, alone)

    assert_same_continuation(case, straight, here)
    assert_same_curve(case, finished(case.config(saved(straight, "elsewhere"), there)), alone)


HALF: tuple[dict[str, Any], ...] = (
    {"training__precision": "bf16"},
    {"training__precision": "fp16", "optimizer__initial_loss_scale": 2.0**12},
)
DROPOUT = {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1}


@pytest.mark.process
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_run_with_dropout_resumes_exactly_in_half_precision(seed: int, tmp_path: Path) -> None:
    """bf16 for even seeds, and fp16 for odd ones."""
    case = draw(seed, tmp_path)
    print(json.dumps(dataclasses.asdict(case)))
    layout, changes = case.layouts[0], HALF[seed % 2] | DROPOUT
    straight = finished(case.config("straight", layout, **changes))
    assert_same_continuation(case, straight, layout, **changes)


def assert_same_continuation(case: Case, straight: Run, layout: dict[str, Any], **changes: Any) -> None:
    """A run that resumes from step SAVED of `straight`, without evaluations, has its later steps and its weights."""
    changes["training__eval_iters"] = 0
    resumed = finished(case.config(saved(straight, "resumed"), layout, **changes))
    assert resumed.steps == straight.steps[SAVED:]
    last = f"iter_{STEPS:07}"
    assert_same_checkpoint(resumed.checkpoints / last, straight.checkpoints / last)


def saved(run: Run, name: str) -> str:
    """`name`, after a copy of the checkpoint of step SAVED to the directory of the run with this name."""
    checkpoint = run.checkpoints / f"iter_{SAVED:07}"
    shutil.copytree(checkpoint, run.directory.with_name(name) / "checkpoints" / checkpoint.name)
    return name


def assert_same_curve(case: Case, run: Run, alone: Run) -> None:
    """The steps of `run` have the losses, gradient norms and loads of experts of the same steps of one process."""
    rounding = ROUNDING_OF_LATENTS if case.alone["model"].get("multi_latent_attention") else ROUNDING
    if case.alone["data"].get("sft"):
        rounding *= 2  # about half of the tokens are learned, so a mean is over fewer numbers
    steps, expected = values(run), values(alone)
    assert len(steps) in (STEPS, STEPS - SAVED)
    for step, reference in zip(steps, expected[-len(steps) :], strict=True):
        assert step.keys() == reference.keys()
        for name, value in step.items():
            numpy.testing.assert_allclose(value, reference[name], rtol=rounding, atol=1e-12, err_msg=name)


def values(run: Run) -> list[dict[str, Any]]:
    """The losses, the gradient norm and the numbers of experts of each step."""
    steps = [event for event in run.events if event["event"] == "step"]
    return [
        {
            name: value
            for name, value in step.items()
            if name.endswith(("loss", "norm")) or name.startswith("moe_")
        }
        for step in steps
    ]


def assert_same_evaluations(run: Run, alone: Run) -> None:
    assert [each[:2] for each in run.evaluations] == [each[:2] for each in alone.evaluations]
    numpy.testing.assert_allclose(
        [loss for *_, loss in run.evaluations],
        [loss for *_, loss in alone.evaluations],
        rtol=ROUNDING_OF_LATENTS,
    )


@pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults
@pytest.mark.parametrize("seed", SEEDS)
def test_core_builds_a_random_layout(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the rules accept a layout, Core builds its first, middle and last rank without an error."""
    fake = functools.partial(torch.distributed.init_process_group, "fake", store=FakeStore())
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda rank, world_size, **_: fake(rank=rank, world_size=world_size),
    )
    monkeypatch.setattr(groups, "open_store", lambda *_: None)
    case = draw(seed, tmp_path, large=True)
    print(json.dumps(dataclasses.asdict(case)))
    for layout in case.layouts:
        document = case.config(
            "large", layout, optimizer__parameter_groups=[]
        )  # need the names of other ranks
        written = configuration.from_dict(TrainerConfig, document, "a random run")
        require(written)
        config = resolve(written)
        require(config)
        for rank in {0, config.world_size // 2, config.world_size - 1}:
            ranks = Ranks(rank, rank, config.world_size, "a test")
            try:
                collection = groups.initialize(config, ranks, {})
                build_optimizer(config, build_model(config, collection, kernels.choose(config)))
            finally:
                parallel_state.destroy_model_parallel()
                torch.distributed.destroy_process_group()
