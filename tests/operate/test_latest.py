"""The end of a metrics.jsonl is read quickly, and afterwards only what was added."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpcgen.runs.latest import NOTHING, Tail


def line(event: str, iteration: int, time: float, **values: Any) -> str:
    return json.dumps({"event": event, "iteration": iteration, "time": time, **values}) + "\n"


def steps(first: int, last: int, began: float, seconds: float) -> str:
    return "".join(line("step", n, began + seconds * (n - first), loss=1 / n) for n in range(first, last + 1))


def test_nothing_was_recorded(tmp_path: Path) -> None:
    assert Tail(tmp_path / "metrics.jsonl").read() == NOTHING


def test_the_pace_is_that_of_the_last_attempt(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(
        line("start", 0, 50, train_iters=9)
        + steps(1, 5, 100, 30)
        + line("start", 5, 300, train_iters=900)
        + steps(6, 10, 400, 2)
        + line("evaluation", 10, 410, split="valid", loss=2.5)
        + line("step", 11, 430, loss=0.25)
        + '{"event": "step", "iteration": 12, "ti'
    )
    latest = Tail(metrics).read()
    assert (latest.iteration, latest.step["loss"], latest.start["train_iters"]) == (11, 0.25, 900)
    assert latest.pace_s == 6  # 30 s for 5 steps, one of which waited for the evaluation
    assert (latest.evaluation["loss"], latest.last_time) == (2.5, 430)


def test_a_long_file_is_read_from_its_end(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(line("start", 0, 0, train_iters=10**6) + steps(1, 30_000, 1000, 0.5))
    latest = Tail(metrics).read()
    assert (latest.iteration, latest.pace_s) == (30_000, 0.5)
    assert latest.start == {}  # 1.8 MB before the end
    assert latest.first_step["iteration"] > 20_000


def test_only_added_lines_are_read_again(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(line("start", 0, 0) + steps(1, 3, 10, 1))
    tail = Tail(metrics)
    assert tail.read().iteration == 3
    with metrics.open("r+") as file:  # what was read before is not looked at again
        file.write("x" * 20)
        file.seek(0, 2)
        file.write(line("step", 4, 13) + line("stop", 4, 14, reason="asked to stop"))
    latest = tail.read()
    assert (latest.iteration, latest.stop_reason, latest.first_step["iteration"]) == (4, "asked to stop", 1)


def test_a_resume_that_drops_lines_is_read_anew(tmp_path: Path) -> None:
    metrics, copy = tmp_path / "metrics.jsonl", tmp_path / "copy"
    metrics.write_text(line("start", 0, 0) + steps(1, 9, 10, 1))
    tail = Tail(metrics)
    assert tail.read().iteration == 9
    copy.write_text(line("start", 0, 0) + steps(1, 4, 10, 1) + line("start", 4, 50, restart=1))
    copy.replace(metrics)
    latest = tail.read()
    assert (latest.iteration, latest.start["restart"], latest.pace_s) == (4, 1, None)


def test_lines_that_the_trainer_did_not_write_are_ignored(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    strange = [
        "null",
        "[]",
        '"step"',
        "{",
        '{"event": "step"}',
        '{"event": "step", "iteration": "9"}',
        "[" * 10**5,
    ]
    metrics.write_text(line("start", 0, 0) + steps(1, 2, 1, 1) + "\n".join(strange) + "\n")
    assert Tail(metrics).read().iteration == 2
