"""Options of the whole suite."""

from __future__ import annotations

import pytest
import setuptools  # noqa: F401  # before anything imports distutils, which it then refuses to replace


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="Write the golden scripts anew from what is rendered now.",
    )
