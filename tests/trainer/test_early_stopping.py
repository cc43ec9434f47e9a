"""The end of a run whose evaluations no longer improve, and its best checkpoint."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import Run, finished, run
from trainer.contract.config import EarlyStopping, TrainingConfig
from trainer.contract.errors import Exit
from trainer.faults.best import BestWatch


def watch(**keys: Any) -> BestWatch:
    training = TrainingConfig(
        micro_batch_size=1, global_batch_size=1, train_iters=100, early_stopping=EarlyStopping(**keys)
    )
    return BestWatch(training)


def test_only_a_change_above_the_threshold_extends_the_run() -> None:
    watched = watch(min_delta=0.5, patience=2)
    for each in ((1, 4.0), (2, 3.5), (3, 3.4)):
        watched.observe(*each)
    assert (watched.iteration, watched.reason_to_stop()) == (3, None)
    assert not watched.observe(4, math.nan)
    assert not watched.observe(5, None)
    assert watched.reason_to_stop() == (
        "stopped early at iteration 5: valid/loss has not improved by more than 0.5 for 2 evaluations; the best is 3.4 "
        "at iteration 3"
    )


def test_the_best_value_is_the_best_whatever_the_threshold() -> None:
    watched = watch(min_delta=0.1, patience=2)
    assert [watched.observe(*each) for each in ((28, 0.853805), (30, 0.830090))] == [True, True]
    resumed = watch(min_delta=0.1, patience=2)
    resumed.load_state_dict(watched.state_dict())
    assert not resumed.observe(32, 0.856411)
    reason = resumed.reason_to_stop()
    assert reason is not None
    assert reason.startswith("stopped early at iteration 32")
    assert reason.endswith("the best is 0.83009 at iteration 30")


def test_higher_values_are_better_with_mode_max() -> None:
    watched = watch(mode="max", monitor="valid/accuracy", patience=1)
    assert [watched.observe(1, 0.5), watched.observe(2, 0.6)] == [True, True]
    assert not watched.observe(3, 0.55)
    assert watched.reason_to_stop()


def test_an_evaluation_that_is_repeated_after_a_resume_counts_once() -> None:
    watched = watch(patience=2)
    watched.observe(1, 4.0)
    watched.observe(2, 5.0)
    resumed = watch(patience=2)
    resumed.load_state_dict(watched.state_dict())
    assert not resumed.observe(2, 5.0)
    assert resumed.reason_to_stop() is None
    assert not resumed.observe(3, 5.0)
    assert resumed.reason_to_stop()


def test_another_number_to_watch_starts_over() -> None:
    watched = watch(patience=1)
    watched.observe(1, 4.0)
    watched.observe(2, 5.0)
    other = watch(patience=1, monitor="valid/wiki/loss")
    other.load_state_dict(watched.state_dict())
    assert other.reason_to_stop() is None
    assert other.observe(3, 9.0)


@pytest.fixture
def overfitting(config: dict[str, Any], other_corpus: str) -> dict[str, Any]:
    """A run that learns tokens which its validation set does not have, so the loss of the set soon rises."""
    train = config["data"]["datasets"]
    config["data"] = {"train": train, "valid": [{"prefix": other_corpus}], "num_workers": 0}
    config["training"] |= {
        "train_iters": 40,
        "eval_interval": 2,
        "eval_iters": 1,
        "early_stopping": {"patience": 3},
    }
    config["optimizer"] |= {"lr_decay_iters": 40}
    config["checkpoint"] = {"save_interval": 5, "keep_last": 1, "keep_best": True}
    return config


def in_directory(config: dict[str, Any], directory: Path, **training: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config) | {"run_dir": str(directory)}
    changed["training"] |= training
    return changed


def saved(found: Run) -> list[str]:
    return sorted(path.name for path in found.checkpoints.glob("iter_*"))


@pytest.mark.process
def test_a_run_ends_when_its_evaluations_no_longer_improve(
    overfitting: dict[str, Any], tmp_path: Path
) -> None:
    found = finished(in_directory(overfitting, tmp_path / "run"))
    steps = found.steps
    losses = [(loss, iteration) for iteration, split, loss in found.evaluations if split == "valid"]
    best, end = min(losses)[1], losses[-1][1]
    assert end == best + 2 * 3 < 40
    reason = f"stopped early at iteration {end}: valid/loss has not improved for 3 evaluations; the best is"
    done = (found.directory / "DONE").read_text().splitlines()
    assert (done[0], len(done)) == (str(end), 3)
    assert done[2].startswith(reason)
    assert reason in found.log
    assert [event["reason"] for event in found.events if event["event"] == "stop"] == [done[2]]
    assert saved(found) == [f"iter_{best:07}", f"iter_{end:07}"]
    assert (found.checkpoints / "best_checkpointed_iteration.txt").read_text() == f"{best}\n"
    assert found.saved_iteration.strip() == str(end)

    again = finished(in_directory(overfitting, tmp_path / "run"))
    assert f"iteration {end} is done, nothing to do" in again.log
    assert (again.directory / "DONE").read_text().splitlines() == done

    patient = finished(in_directory(overfitting, tmp_path / "run", early_stopping={"patience": 4}))
    assert (
        f"stopped early at iteration {end + 2}: valid/loss has not improved for 4 evaluations" in patient.log
    )
    assert patient.steps[:end] == steps


@pytest.mark.process
def test_an_interrupted_run_ends_at_the_same_iteration(overfitting: dict[str, Any], tmp_path: Path) -> None:
    complete = finished(in_directory(overfitting, tmp_path / "complete"))
    last = complete.steps[-1][0]
    interrupted = in_directory(overfitting, tmp_path / "interrupted", train_iters=last - 1)
    finished(interrupted)
    resumed = finished(in_directory(overfitting, tmp_path / "interrupted"))
    assert (resumed.steps, resumed.evaluations[-1]) == (complete.steps, complete.evaluations[-1])
    ends = [(each.directory / "DONE").read_text().splitlines()[::2] for each in (resumed, complete)]
    assert ends[0] == ends[1]  # the second line is the hash of the configuration with its run_dir
    assert saved(resumed) == saved(complete)


@pytest.mark.process
def test_a_column_that_evaluations_do_not_have_is_refused(overfitting: dict[str, Any]) -> None:
    overfitting["training"]["early_stopping"] = {"monitor": "valid/accuracy", "mode": "max"}
    found = run(overfitting)
    assert set(found.statuses) == {Exit.REFUSED}
    assert "evaluations have no column 'accuracy'; they have loss" in found.log
