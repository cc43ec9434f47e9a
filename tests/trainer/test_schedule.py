"""Learning rates compared with Megatron-LM's formulas, and users' functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.runs import ROOT
from trainer.contract.config import OptimizerConfig
from trainer.contract.errors import TrainerError
from trainer.optimizer.schedule import Schedule

pytestmark = pytest.mark.usefixtures("code_of_this_test")

PEAK, LEAST, WARMUP, END, TAIL = 1e-3, 1e-4, 10, 110, 20


def schedule(groups: list[dict[str, Any]] | None = None, train_iters: int = 130, **changes: Any) -> Schedule:
    values = {
        "lr": PEAK,
        "min_lr": LEAST,
        "lr_warmup_iters": WARMUP,
        "lr_decay_iters": END,
        "lr_wsd_decay_iters": TAIL,
        "weight_decay": 0.1,
    }
    optimizer = SimpleNamespace(param_groups=groups or [{}])
    return Schedule(OptimizerConfig(**(values | changes)), optimizer, train_iters)


def rates(steps: int = 130, **changes: Any) -> list[float]:
    """The rates of the first steps."""
    group: dict[str, Any] = {}
    made = schedule([group], **changes)
    found = []
    for _ in range(steps):
        assert group["lr"] == made.rate()
        found.append(made.rate())
        made.step(1)
    return found


def decay(coefficient: Callable[[float], float], start: int = WARMUP) -> Callable[[int], float]:
    """Decay from the peak to the minimum between `start` and END, by the fraction of completed steps."""
    return lambda n: LEAST + (PEAK - LEAST) * (coefficient((n - start) / (END - start)) if n >= start else 1)


FORMULAS: dict[str, tuple[dict[str, str], Callable[[int], float]]] = {
    "constant": ({"lr_decay_style": "constant"}, lambda n: PEAK),
    "linear": ({"lr_decay_style": "linear"}, decay(lambda done: 1 - done)),
    "cosine": ({"lr_decay_style": "cosine"}, decay(lambda done: 0.5 * (1 + math.cos(math.pi * done)))),
    "inverse square root": (
        {"lr_decay_style": "inverse-square-root"},
        lambda n: max(LEAST, PEAK * math.sqrt(WARMUP / n)),
    ),
    "WSD exponential": ({"lr_decay_style": "WSD"}, decay(lambda done: 2 * 0.5**done - 1, END - TAIL)),
    "WSD linear": (
        {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"},
        decay(lambda done: 1 - done, END - TAIL),
    ),
    "WSD cosine": (
        {"lr_decay_style": "WSD", "lr_wsd_decay_style": "cosine"},
        decay(lambda done: 0.5 * (1 + math.cos(math.pi * done)), END - TAIL),
    ),
    "WSD minus square root": (
        {"lr_decay_style": "WSD", "lr_wsd_decay_style": "minus_sqrt"},
        decay(lambda done: 1 - math.sqrt(done), END - TAIL),
    ),
}


@pytest.mark.parametrize(("changes", "formula"), FORMULAS.values(), ids=FORMULAS)
def test_each_schedule_is_its_formula(changes: dict[str, str], formula: Callable[[int], float]) -> None:
    found = rates(**changes)
    assert found[:WARMUP] == pytest.approx([PEAK * n / WARMUP for n in range(WARMUP)])
    assert found[WARMUP : END + 1] == pytest.approx([formula(n) for n in range(WARMUP, END + 1)])
    assert found[END + 1 :] == [PEAK if "constant" in changes.values() else LEAST] * (len(found) - END - 1)


def test_the_warmup_may_start_above_zero() -> None:
    assert rates(3, lr_warmup_init=5e-4, lr_warmup_iters=2) == pytest.approx([5e-4, 7.5e-4, 1e-3])


def test_a_resumed_schedule_has_the_same_rate() -> None:
    resumed = schedule()
    resumed.step(57)
    assert resumed.rate() == rates(58)[57]


def test_groups_have_multiples_of_rate_and_weight_decay() -> None:
    groups = [{"wd_mult": 0.0, "lr_mult": 1.0}, {"wd_mult": 0.5, "lr_mult": 0.1}]
    made = schedule(groups, lr_warmup_init=1e-4)
    assert [group["lr"] for group in groups] == pytest.approx([1e-4, 1e-5])  # of the warm-up too
    made.step(WARMUP)
    assert [group["lr"] for group in groups] == pytest.approx([PEAK, PEAK / 10])
    assert [group["weight_decay"] for group in groups] == pytest.approx([0.0, 0.05])


def test_the_example_restarts_its_cosine() -> None:
    """Four cosines of 25 steps between Core's warm-up and the end."""
    found = rates(lr_schedule=f"{ROOT}/examples/cosine_restarts.py:rate")
    assert found[:WARMUP] == rates(WARMUP)
    cosine = [LEAST + (PEAK - LEAST) * 0.5 * (1 + math.cos(math.pi * n / 25)) for n in range(25)]
    assert found[WARMUP:END] == pytest.approx([PEAK, *cosine[1:], *cosine, *cosine, *cosine])
    assert set(found[END:]) == {LEAST}


@pytest.mark.parametrize("returned", ["-1e-3", "float('nan')", "float('inf')", "None", "'0.1'"])
def test_an_invalid_rate_is_refused_before_the_first_step(returned: str, tmp_path: Path) -> None:
    file = tmp_path / f"wrong_rate_{abs(hash(returned))}.py"
    file.write_text(f"def rate(iteration, optimizer):\n    return {returned} if iteration == 12 else 1e-3\n")
    with pytest.raises(
        TrainerError, match=r"returns .* for iteration 12. It must return a non-negative number"
    ):
        schedule(lr_schedule=f"{file}:rate")


def test_a_schedule_that_fails_after_the_warm_up_is_refused_before_the_first_step(tmp_path: Path) -> None:
    file = tmp_path / "failing_rate.py"
    file.write_text("def rate(iteration, optimizer):\n    return 1e-3 / abs(iteration - 60)\n")
    with pytest.raises(TrainerError, match=r"raises ZeroDivisionError for iteration 60: .*failing_rate.py:2"):
        schedule(lr_schedule=f"{file}:rate")


@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize("train_iters", [60, 20_000])
def test_a_schedule_need_not_support_steps_beyond_the_last(
    train_iters: int, warmup: int, tmp_path: Path
) -> None:
    """Core asks for the rate after the last one."""
    file = tmp_path / f"to_zero_{train_iters}_{warmup}.py"
    last = train_iters - 1
    file.write_text(
        f"def rate(iteration, optimizer):\n    return optimizer.lr * ({last} - iteration) / {last}\n"
    )
    own = {"lr_schedule": f"{file}:rate", "lr_warmup_iters": warmup}
    made = schedule(train_iters=train_iters, **own)
    made.step(last)
    assert made.rate() == 0
    made.step(1)
    with pytest.raises(TrainerError, match=rf"returns -\S+ for iteration {train_iters}. It must return"):
        schedule(train_iters=train_iters + 1, **own)
