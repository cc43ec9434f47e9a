"""Random runs: one curve at every layout, exact resumption, and continuation at another layout.

`make test-random SEEDS="17 18"` runs the cases of these seeds. A failed test prints its case as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.trainer.random_runs import SAVED, STEPS, Case, draw
from tests.trainer.runs import Run, finished
from tests.trainer.tensors import assert_same_checkpoint

pytestmark = [pytest.mark.process, pytest.mark.slow]

SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "").split()] or [*range(6)]
ROUNDING, ROUNDING_OF_LATENTS = 5e-7, 1e-6
"""Largest relative difference of a loss or gradient norm in fp32, without and with latent attention."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_run(seed: int, tmp_path: Path) -> None:
    case = draw(seed, tmp_path)
    print(json.dumps(dataclasses.asdict(case)))
    here, there = case.layouts
    alone = finished(case.config("alone", {}))
    straight = finished(case.config("straight", here))
    assert_same_curve(case, straight, alone)
    assert_same_evaluations(straight, alone)

    resumed = finished(case.config(saved(straight, "resumed"), here, training__eval_iters=0))
    assert resumed.steps == straight.steps[SAVED:]
    last = f"iter_{STEPS:07}"
    assert_same_checkpoint(resumed.checkpoints / last, straight.checkpoints / last)
    assert_same_curve(case, finished(case.config(saved(straight, "elsewhere"), there)), alone)


def saved(run: Run, name: str) -> str:
    """`name`, after a copy of the checkpoint of step SAVED to the directory of the run with this name."""
    checkpoint = run.checkpoints / f"iter_{SAVED:07}"
    shutil.copytree(checkpoint, run.directory.with_name(name) / "checkpoints" / checkpoint.name)
    return name


def assert_same_curve(case: Case, run: Run, alone: Run) -> None:
    """The steps of `run` have the losses, gradient norms and loads of experts of the same steps of one process."""
    rounding = ROUNDING_OF_LATENTS if case.alone["model"].get("multi_latent_attention") else ROUNDING
    steps, expected = values(run), values(alone)
    assert len(steps) in (STEPS, STEPS - SAVED)
    for step, reference in zip(steps, expected[-len(steps) :], strict=True):
        assert step.keys() == reference.keys()
        for name, value in step.items():
            numpy.testing.assert_allclose(value, reference[name], rtol=rounding, atol=1e-12, err_msg=name)


def values(run: Run) -> list[dict[str, Any]]:
    """What each step computed."""
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
