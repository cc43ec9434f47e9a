"""The shipped tables of measured kernels (topologies/kernels)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcgen.config.node_types import load_node_type
from hpcgen.planning.step_time.measurements import SECTIONS, measurements_of

ROOT = Path(__file__).parents[3]
TABLES = {path.stem: json.loads(path.read_text()) for path in (ROOT / "topologies/kernels").glob("*.json")}
"""Tables by the name of the node type with that GPU."""


@pytest.fixture(params=sorted(TABLES))
def node_type(request: pytest.FixtureRequest) -> Any:
    return load_node_type(request.param)


@pytest.fixture
def table(node_type: Any) -> dict[str, Any]:
    return next(table for table in TABLES.values() if table["gpu_model"] == node_type.gpu_model)


def test_table_is_found_and_says_what_measured_it(node_type: Any, table: dict[str, Any]) -> None:
    found = measurements_of(node_type.gpu_model)
    assert found is not None
    assert all(len(getattr(found, name)) == len(table[name]) > 0 for name in SECTIONS)
    assert table["measured"].keys() == {"machine", "date", "versions"}


def test_no_row_is_faster_than_the_gpu(node_type: Any, table: dict[str, Any]) -> None:
    for row in table["products"]:
        tflops = 2 * row["m"] * row["n"] * row["k"] / row["us"] / 1e6
        assert 0.1 < tflops / node_type.peak_tflops[row["precision"]] < 0.95, row
    for row in table["memory"]:
        assert 0.05 < row["bytes"] / row["us"] / 1e3 / node_type.gpu_memory_gb_s < 1, row
    for row in table["attention"]:
        products = {"forward": 2, "backward": 5}[row["pass"]]
        width = (row["qk_dim"] + row["v_dim"]) / 2
        flops = products * row["batch"] * row["heads"] * row["seq"] ** 2 * width
        assert 0.1 < flops / row["us"] / 1e6 / node_type.peak_tflops["bf16"] < 0.95, row
    for row in table["collectives"]:
        assert row["bytes"] / row["us"] / 1e3 / node_type.nvlink.bandwidth_gb_s < 1, row


def test_no_row_is_there_twice(table: dict[str, Any]) -> None:
    for name in SECTIONS:
        shapes = [{key: value for key, value in row.items() if key != "us"} for row in table[name]]
        assert all(shape not in shapes[:index] for index, shape in enumerate(shapes)), name
