"""Old checkpoints are removed, except those that a rule, a pin or an evaluation keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorded_run import write_checkpoint
from trainer.checkpoint.retention import prune
from trainer.contract.evaluation import evaluated, result_file
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import PINNED, TRACKER, kept, list_checkpoints


def make(directory: Path, *iterations: int, pinned: tuple[int, ...] = (), torn: tuple[int, ...] = ()) -> None:
    for iteration in iterations:
        path = checkpoint_files.iteration_directory(directory, iteration)
        if iteration in torn:
            path.mkdir(parents=True)
        else:
            write_checkpoint(directory, iteration)
        if iteration in pinned:
            (path / PINNED).touch()


def remaining(directory: Path) -> list[int]:
    return sorted(checkpoint.iteration for checkpoint in list_checkpoints(directory))


def test_retention(tmp_path: Path) -> None:
    make(tmp_path, *range(10, 110, 10), pinned=(10,), torn=(100,))
    assert prune(tmp_path, keep_last=None, keep_every=40) == []
    removed = prune(tmp_path, keep_last=2, keep_every=40)
    assert [path.name for path in removed] == [f"iter_{number:07d}" for number in (70, 60, 50, 30, 20)]
    assert remaining(tmp_path) == [10, 40, 80, 90, 100]
    reasons = kept(list_checkpoints(tmp_path), keep_last=2, keep_every=40)
    assert reasons == {
        100: "not complete",
        90: "the newest",
        80: "keep_last = 2",
        40: "keep_every = 40",
        10: "pinned",
    }


def test_retention_keeps_checkpoints_until_they_are_evaluated(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    make(checkpoints, 0, *range(10, 60, 10), torn=(40,))
    rules = {"keep_last": 1, "keep_every": None, "evaluation_every": 20}
    assert [path.name for path in prune(checkpoints, **rules, evaluated=evaluated(tmp_path))] == [
        "iter_0000030",
        "iter_0000010",
        "iter_0000000",
    ]
    assert kept(list_checkpoints(checkpoints), **rules)[20] == "to be evaluated"
    result = result_file(tmp_path, 20)
    result.parent.mkdir()
    result.touch()
    assert [path.name for path in prune(checkpoints, **rules, evaluated=evaluated(tmp_path))] == [
        "iter_0000020"
    ]
    assert remaining(checkpoints) == [40, 50]


def test_checkpoints_of_megatron_lm_are_listed_by_its_tracker_and_never_removed(tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 30, torn=(10, 20, 30))
    for iteration in (10, 20, 30):
        (checkpoint_files.iteration_directory(tmp_path, iteration) / "metadata.json").touch()
    (tmp_path / TRACKER).write_text("20")
    assert [(c.iteration, c.is_foreign) for c in list_checkpoints(tmp_path)] == [
        (30, False),
        (20, True),
        (10, True),
    ]
    make(tmp_path, 40, 50)
    assert prune(tmp_path, keep_last=1, keep_every=None) == [tmp_path / "iter_0000040"]


@pytest.mark.parametrize("text", ["", "12x", "release", "\0\0", "9" * 40])
def test_a_truncated_tracker_is_ignored(text: str, tmp_path: Path) -> None:
    make(tmp_path, 12)
    (tmp_path / TRACKER).write_text(text)
    assert [c.iteration for c in list_checkpoints(tmp_path)] == [12]
