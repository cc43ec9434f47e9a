"""Losses of several runs at the same number of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpcgen.sweeps.comparison import compare_runs
from tests.recorded_run import start, step, write_run

TOKENS = 2048
"""Tokens of a sample."""


def a_run(
    directory: Path, steps: int, level: float, batch: int = 4, valid: Iterable[int] = (), marker: str = "DONE"
) -> Path:
    """A run whose training loss at n tokens is level + 1000 / n, and whose validation loss is 1 more."""

    def event(iteration: int) -> dict[str, Any]:
        tokens = iteration * batch * TOKENS
        return step(
            iteration,
            loss=level + 1000 / tokens,
            consumed_tokens=tokens,
            batch_size=batch,
            tokens_per_s=100.0 * batch,
        )

    events = [start(train_iters=steps)]
    for iteration in range(1, steps + 1):
        events.append(event(iteration))
        if iteration in valid:
            loss = events[-1]["loss"] + 1
            events.append(
                {
                    "event": "evaluation",
                    "iteration": iteration,
                    "time": events[-1]["time"],
                    "split": "valid",
                    "loss": loss,
                }
            )
    write_run(directory, events)
    if marker:
        (directory / marker).write_text(f"{steps}\n")
    return directory


def test_the_lowest_loss_at_equal_tokens_comes_first(tmp_path: Path) -> None:
    runs = {
        "long": a_run(tmp_path / "long", 400, 3.0),
        "large": a_run(tmp_path / "large", 50, 2.5, batch=8),
        "short": a_run(tmp_path / "short", 100, 2.9),
        "new": tmp_path / "new",
    }
    found = compare_runs(runs)
    assert (found.metric, found.tokens) == ("train", 100 * 4 * TOKENS)
    assert [each.name for each in found.results] == ["large", "short", "long", "new"]
    losses = {each.name: each.loss for each in found.results}
    assert losses["new"] is None
    assert losses["long"] == losses["short"] + 0.1 or abs(losses["long"] - losses["short"] - 0.1) < 1e-9
    assert found.results[-1].state == "not started"
    assert found.results[0].tokens_per_s == 800


def test_runs_that_failed_early_do_not_shorten_the_comparison(tmp_path: Path) -> None:
    runs = {
        "good": a_run(tmp_path / "good", 200, 3.0),
        "bad": a_run(tmp_path / "bad", 20, 1.0, marker="FAILED"),
    }
    found = compare_runs(runs)
    assert found.tokens == 200 * 4 * TOKENS
    assert [(each.name, each.state, each.loss is None) for each in found.results] == [
        ("good", "done", False),
        ("bad", "failed", True),
    ]
    only = compare_runs({"bad": runs["bad"]})
    assert only.results[0].loss is not None


def test_validation_losses_are_compared_if_all_runs_have_one(tmp_path: Path) -> None:
    runs = {
        "a": a_run(tmp_path / "a", 300, 3.0, valid=(100, 200, 300)),
        "b": a_run(tmp_path / "b", 250, 2.0, valid=(100, 200)),
    }
    found = compare_runs(runs)
    assert (found.metric, found.tokens) == ("valid", 200 * 4 * TOKENS)
    assert [each.name for each in found.results] == ["b", "a"]
    assert found.results[1].loss == 4.0 + 1000 / (200 * 4 * TOKENS)
    assert compare_runs(runs, "train").tokens == 250 * 4 * TOKENS
    runs["c"] = a_run(tmp_path / "c", 300, 1.0)
    assert compare_runs(runs).metric == "train"
    assert compare_runs(runs, "valid").results[-1].name == "c"


def test_a_run_that_failed_before_its_first_step_tells_why(tmp_path: Path) -> None:
    directory = tmp_path / "failed"
    directory.mkdir()
    (directory / "FAILED").write_text("the corpus is missing\n")
    [result] = compare_runs({"failed": directory}).results
    assert (result.state, result.reason) == ("failed", "the corpus is missing")
