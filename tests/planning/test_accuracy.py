"""Predicted steps next to published ones. Bands are today's: a change that leaves one makes predictions worse."""

from __future__ import annotations

import pytest

from benchmarks.planner.accuracy import Accuracy, Comparison, by_group, compare
from benchmarks.planner.orderings import Ordering, orderings
from benchmarks.planner.own import OwnStep, own_steps, planned_case
from benchmarks.planner.predictions import frozen, predict_planned
from benchmarks.planner.published import Step, configurations, steps
from benchmarks.planner.tables import TABLES, markdown, predictions
from hpcgen.planning.memory import estimate_memory

BANDS = {
    "Megatron-Bridge, dense": (0.035, 0.07, 0.03),
    "NeMo 24.07 to 25.02, dense": (0.065, 0.20, 0.08),
    "complete dense, H100": (0.06, 0.20, 0.07),
    "complete dense, all": (0.065, 0.20, 0.02),
    "A100, 2022": (0.095, 0.17, 0.105),
    "NVIDIA's recipes, bf16": (0.055, 0.10, 0.05),
    "NVIDIA's recipes, FP8": (0.06, 0.13, 0.055),
    "bf16, partly stated": (0.095, 0.57, 0.04),
    "FP8, partly stated": (0.04, 0.07, 0.015),
    "experts": (0.50, 0.57, 0.43),
}
"""Limits of the median, worst and mean error of each group. Experts wait for a host that is not known."""
WAITING_FOR_HOST = {"gpt-tp2", "latent-experts"}
"""Own runs whose GPUs wait for a host that was slower than the one that was measured."""


def measured(*times: float) -> tuple[Step, ...]:
    return tuple(
        Step(str(row), "any", "software", "2026", time, "a page", "") for row, time in enumerate(times)
    )


def test_configurations_count_once() -> None:
    """Three releases of one configuration are one error, that of their median."""
    comparisons = [
        Comparison("a", "bridge", 11.0, measured(9.0, 10.0, 30.0)),
        Comparison("b", "bridge", 8.0, measured(10.0)),
        Comparison("c", "bridge", 10.3, measured(10.0)),
    ]
    found = Accuracy.of(comparisons)
    assert (found.num_configurations, found.num_rows) == (3, 5)
    assert (found.median, found.worst) == pytest.approx((0.1, -0.2))
    assert found.bias == pytest.approx((0.1 - 0.2 + 0.03) / 3)
    assert comparisons[0].software_band == pytest.approx(30 / 9 - 1)


def test_every_row_has_a_source_and_a_configuration() -> None:
    rows = [step for of_configuration in steps().values() for step in of_configuration]
    assert {step.configuration for step in rows} <= configurations().keys()
    assert all(step.source and step.software and step.step_s > 0 for step in rows)
    assert len({step.row for step in rows}) == len(rows)


@pytest.fixture(scope="module")
def accuracy() -> dict[str, Accuracy]:
    return by_group(compare({each.configuration: each.step_s for each in predictions()}))


@pytest.fixture(scope="module")
def pairs() -> list[Ordering]:
    return orderings()


def test_predictions_of_all_measured_runs_were_frozen() -> None:
    assert steps().keys() <= frozen().keys()


@pytest.mark.parametrize("group", BANDS)
def test_errors_stay_within_their_bands(group: str, accuracy: dict[str, Accuracy]) -> None:
    median, worst, bias = BANDS[group]
    found = accuracy[group]
    assert found.median <= median
    assert abs(found.worst) <= worst
    assert abs(found.bias) <= bias


def test_orderings_of_sources_are_predicted(pairs: list[Ordering]) -> None:
    assert [pair.says for pair in pairs if not pair.is_right] == []


def test_predictions_differ_where_layouts_do(pairs: list[Ordering]) -> None:
    assert all(pair.predicted != 1.0 for pair in pairs)


def test_the_same_order_needs_the_same_sign() -> None:
    assert Ordering("", "", 1.05, 1.30).is_right
    assert not Ordering("", "", 1.05, 0.99).is_right
    assert Ordering("", "", "faster", 0.99).is_right
    assert not Ordering("", "", "same", 1.05).is_right


@pytest.mark.parametrize("run", list(own_steps()), ids=lambda run: run.case)
def test_own_runs_take_the_predicted_time_and_memory(run: OwnStep) -> None:
    """Within 7%, and within 2% or 0.5 GiB."""
    planned = planned_case(run.case, run.gpu)
    if run.case not in WAITING_FOR_HOST:
        assert predict_planned(run.case, planned).step_s == pytest.approx(run.step_s, rel=0.07)
    estimated = estimate_memory(planned.setup).total_gib
    assert estimated == pytest.approx(run.allocated_gib, abs=max(0.5, 0.02 * run.allocated_gib))


@pytest.mark.parametrize("name", TABLES)
def test_tables_have_a_row_for_each_comparison(name: str) -> None:
    """All rows have the columns of the first, and no cell breaks the table."""
    head, _, *rows = markdown(TABLES[name]()).splitlines()
    assert rows
    assert {row.count("|") for row in rows} == {head.count("|")}
