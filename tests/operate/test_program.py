"""The progress of a program is found as its batch script finds it. tests/slurm/test_status.py runs the script."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest

from hpcgen.runs.attempts import read_attempts
from hpcgen.runs.program import program_progress
from tests.operate.test_status import end, write_events


def progress(run: Path, kind: str, pattern: str, *others: tuple[str, dict[str, str]]) -> tuple[int, int]:
    write_events(
        run, "7", [("progress", {"kind": kind, "pattern": pattern, "value": "3"}), *others], stage="run"
    )
    found = program_progress(run, read_attempts(run)[-1])
    assert found is not None
    return found.began, found.value


@pytest.mark.parametrize(
    ("text", "value"), [("40\n50\n", 40), ("0040", 40), ("step 40\n", 3), ("9" * 16, 3), ("", 3)]
)
def test_in_a_file(tmp_path: Path, text: str, value: int) -> None:
    (tmp_path / "step").write_text(text)
    assert progress(tmp_path, "file", f"{tmp_path}/step") == (3, value)


def test_in_names_of_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "llama3 [8b]"
    for name in ("step_9", "step_400", "step_88.tmp9x", "other_5000"):
        (run / "checkpoints" / name).mkdir(parents=True)
    assert progress(run, "checkpoints", f"{glob.escape(str(run))}/checkpoints/step_*") == (3, 400)


@pytest.mark.process
def test_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "run-7.log").write_text("at step 8 of 90\nat step 11 of 90\nlr 5\n")
    assert progress(tmp_path, "log", "at step ([[:digit:]]+) of") == (3, 11)


def test_of_an_attempt_that_ended(tmp_path: Path) -> None:
    (tmp_path / "step").write_text("90")  # of a later attempt
    after = ("progress", {"kind": "file", "pattern": f"{tmp_path}/step", "value": "12"})
    assert progress(tmp_path, "file", f"{tmp_path}/step", after, end("failed")) == (3, 12)


@pytest.mark.process
def test_without_a_definition_and_with_a_strange_one(tmp_path: Path) -> None:
    write_events(tmp_path, "6", [], stage="run")
    assert program_progress(tmp_path, read_attempts(tmp_path)[-1]) is None
    os.mkfifo(tmp_path / "fifo")
    assert progress(tmp_path, "file", f"{tmp_path}/fifo") == (3, 3)
    assert progress(tmp_path, "log", "(") == (3, 3)
    (tmp_path / "run-7.log").write_text("a" * 60)
    assert progress(tmp_path, "log", "(a+)+b([0-9]+)") == (3, 3)
    (tmp_path / "run-7.log").write_text(f"\xff step 9\nstep {'7' * 16}\nstep \0", encoding="latin-1")
    assert progress(tmp_path, "log", "step ([0-9]+)") == (3, 3)
    assert progress(tmp_path, "log", "step ([0-9]{1,2})$") == (3, 9)
