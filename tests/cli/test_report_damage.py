"""Reports of runs whose metrics have damaged lines: they are skipped and counted, whatever is in them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hpcgen.cli.report import _show
from hpcgen.report.page import render_page
from hpcgen.report.run import read_run
from hpcgen.report.scale import scale_for
from hpcgen.report.summary import summarize
from hpcgen.runs.history import read_history
from tests.recorded_run import CONFIG, START, start, step, steps, write_run

ODD: list[Any] = [
    *(None, True, "x", "\ud800", [], {}, [["\ud800"]], {"a": {"b": 1}}, -1, 0, 2**63, 10**400),
    *(1e308, -1e308, 1e-320, 1e17, float("nan"), float("inf"), -float("inf"), [[1]], 1.5),
]
"""Values that no field of a line has, or few."""
LAST = 1000
EVENTS = [
    start(),
    {"event": "evaluation", "iteration": 1, "time": START + 2, "split": "valid", "loss": 3.0},
    {"event": "spike", "iteration": 1, "time": START + 2, "loss": 9.0, "median": 3.0, "samples": [1, 2]},
    {"event": "checkpoint", "iteration": 1, "time": START + 2, "stall_s": 1.0, "write_s": 2.0, "path": "c"},
    {"event": "straggler", "iteration": 1, "time": START + 2, "rank": 3, "host": "n1", "slowdown": 1.5},
    {"event": "experts", "iteration": 1, "time": START + 2, "loads": [[1.0, 0.5], [1.0, 1.5]]},
    {"event": "stop", "iteration": 1, "time": START + 2, "reason": "SIGUSR2"},
    start(
        1, START + 3, lost={"iteration": 2, "time": START + 2}, changed=[["a", 1, 2]], passed_over=["x: y"]
    ),
    step(2, moe_max_load=1.5, moe_min_load=0.5, moe_dropped=0.1, mtp_1_loss=3.0),
]
"""An event of each kind, with every field that a report reads."""


def shown(directory: Path) -> int:
    """Reads the run, prints it and renders its page. Returns the number of damaged lines."""
    run = read_run(directory, START + 1000)
    summary = summarize(run)
    json.dumps(dataclasses.asdict(summary)).encode()
    _show("run", run, summary)
    render_page([run]).encode()
    return summary.unreadable_lines


@pytest.mark.parametrize("event", EVENTS[1:], ids=lambda event: str(event["event"]))
@pytest.mark.filterwarnings("error")
def test_an_odd_value_in_any_field_is_no_traceback(tmp_path: Path, event: dict[str, Any]) -> None:
    """Every odd value in every field has a line of its own. The last lines are a healthy attempt."""
    cases = [(field, value) for field in (*event, "surprise") for value in ODD]
    numbered = [
        {**event, "iteration": 2 + number, field: value} for number, (field, value) in enumerate(cases)
    ]
    healthy = [start(LAST - 1, START + 5), step(LAST, loss=3.25)]
    run = write_run(tmp_path / "run", [*EVENTS, *numbered, *healthy])
    damaged = shown(run)
    assert damaged == read_history(run / "metrics.jsonl").unreadable_lines
    fields = len(event) + 1
    assert 2 * fields <= damaged < len(cases)  # unpaired surrogates and the integer of 400 digits, at least


@pytest.mark.parametrize(
    "value",
    [None, "\ud800", {}, -1, 10**400, float("nan"), -float("inf")],
    ids=lambda value: repr(value)[:20],
)
def test_odd_values_in_all_other_files_are_no_traceback(tmp_path: Path, value: Any) -> None:
    run = write_run(tmp_path / "run", [start(), *steps(1, 3), {**start(3), "lost": None}])
    last = {key: value for key in start() if key not in ("event", "iteration")}
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"event": "start", "iteration": 3, key: value}) + "\n" for key in last)
        file.write(json.dumps(step(4)) + "\n")
    shown(run)
    beat = dict.fromkeys(("time", "iteration", "phase", "host", "pid"), value)
    (run / "heartbeat").write_text(json.dumps(beat))
    for marker in ("STOPPED", "FAILED"):
        (run / marker).write_bytes(b"\xff" + json.dumps(value).encode())
        shown(run)
        (run / marker).unlink()
    odd = {
        key: dict.fromkeys(section, value) if isinstance(section, dict) else value
        for key, section in CONFIG.items()
    }
    evaluation = run / "evaluation"
    evaluation.mkdir()
    nested = {**CONFIG, "data": {"datasets": [{"prefix": value}, {"prefix": f"/{value}\0"}]}}
    for config in (value, odd, nested, dict.fromkeys(CONFIG, value)):
        (run / "trained-with.json").write_text(json.dumps(config))
        (evaluation / "iter_0000003.json").write_text(
            json.dumps({"format": 1, "iteration": 3, "data": value})
        )
        shown(run)


def test_damaged_lines_are_counted_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [start(), *steps(1, 3)])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "step", "iteration": 4, "loss": \xff}\n{"event": "step", "iteration": -1}\n')
        file.write(json.dumps(step(4)).encode() + b'\n{"event": "step", "itera')
    assert shown(run) == 2
    printed = capsys.readouterr()
    assert printed.err == f"warning: 2 unreadable lines of {run}/metrics.jsonl ignored\n"


@pytest.mark.parametrize(("low", "high"), [(5e-324, 3.5e38), (1e-320, 1.0), (1.0, 3.5e38), (1e-310, 1e-309)])
@pytest.mark.filterwarnings("error")
def test_an_axis_over_any_range_of_numbers(low: float, high: float) -> None:
    scale = scale_for(low, high, log_from=2.5)
    assert scale.is_log
    assert 0 <= scale.place(low) < scale.place(high) <= 1
    assert all(scale.low * 0.99 <= tick <= scale.high * 1.01 for tick in scale.ticks())
