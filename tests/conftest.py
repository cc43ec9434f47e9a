"""Options of the whole suite."""

from __future__ import annotations

import hypothesis
import pytest

# A machine that is busy with the neighbour's test is no reason to fail.
hypothesis.settings.register_profile(
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="Write the golden scripts anew from what is rendered now.",
    )
