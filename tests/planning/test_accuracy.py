"""Predicted steps next to published ones."""

from __future__ import annotations

import pytest

from benchmarks.planner.accuracy import Accuracy, Comparison
from benchmarks.planner.orderings import Ordering, orderings
from benchmarks.planner.published import Step, configurations, steps


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
def pairs() -> list[Ordering]:
    return orderings()


def test_predictions_differ_where_layouts_do(pairs: list[Ordering]) -> None:
    assert all(pair.predicted != 1.0 for pair in pairs)


def test_the_same_order_needs_the_same_sign() -> None:
    assert Ordering("", "", 1.05, 1.30).is_right
    assert not Ordering("", "", 1.05, 0.99).is_right
    assert Ordering("", "", "faster", 0.99).is_right
    assert not Ordering("", "", "same", 1.05).is_right
