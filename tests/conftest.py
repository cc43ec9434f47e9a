"""Options of the whole suite."""

from __future__ import annotations

import signal

import hypothesis
import pytest

# A shell starts `make test &` with SIGINT ignored, and every process that a test starts would inherit that: those that
# a test interrupts would go on. What has a handler here has the default action there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
