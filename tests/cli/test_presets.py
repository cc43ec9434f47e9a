from __future__ import annotations

import json

from hpcgen.config.presets import PRESETS
from tests.cli.command import hpcgen


def test_the_table():
    found = hpcgen("presets")
    assert (found.status, found.stderr) == (0, "")
    header, *rows = found.stdout.splitlines()
    assert header.split()[:2] == ["preset", "parameters"]
    assert [row.split()[0] for row in rows if " B " in row] == list(PRESETS)
    assert "174.605 B" in found.stdout
    assert "\x1b" not in found.stdout


def test_json_has_what_the_table_has():
    rows = json.loads(hpcgen("presets", "--json").stdout)
    by_name = {row["name"]: row for row in rows}
    assert list(by_name) == list(PRESETS)
    assert by_name["175b"]["parameters"] == 174_604_836_864
    assert by_name["llama3-8b"]["parameters"] == 8_030_261_248
    assert by_name["13b"]["tensor_model_parallel_size"] == 2
