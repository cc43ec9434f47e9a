"""What hpcgen status prints: in a pipe, as JSON, and on the screen of --watch."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from hpcgen.cli import watching
from hpcgen.cli.status_rows import lines, moment, rows
from hpcgen.runs.status import RunStatus
from tests.cli.command import hpcgen
from tests.operate.test_status import NOW, answer, end, queued, status, training_run, write_events
from tests.runs import minimal_run, write_yaml

pytestmark = pytest.mark.process
__all__ = ["training_run"]

GUIDE = Path(__file__).parents[2] / "docs" / "operate.md"


@pytest.fixture(autouse=True)
def without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def text_of(found: RunStatus, now: float = NOW, width: int = 80) -> str:
    return "\n".join(lines(rows(found, now), width))


def test_a_running_run_in_a_pipe(training_run: Path) -> None:
    job = queued(log=f"{training_run}/train-7.log", starts=NOW - 600, ends=NOW + 300)
    text = text_of(status(training_run, answer(job)))
    plain = re.sub(r"\x1b\[\d*m", "", text)
    assert plain.splitlines()[0] == "gpt: running, iteration 300 of 1,000 (30.0%)"
    assert "262,144 tokens/s, MFU 12.9%, 2 s per step (20 s ago)" in plain
    assert f"in 23 min, {moment(NOW + 1380, NOW)}, at 2 s per step with saves" in plain
    assert "the job reaches its time limit before, in 5 min" in plain
    assert "7 (train) runs for 10 min on n[1-2], until" in plain
    assert all(len(line) <= 80 for line in plain.splitlines())


def test_thousands_of_tasks_take_one_line(training_run: Path) -> None:
    tasks = ",".join(str(number) for number in range(1, 4000, 2))
    job = queued(job=f"9_[{tasks}]", state="PENDING", log=f"{training_run}/tokenize-9_%a.log")
    plain = re.sub(r"\x1b\[\d*m", "", text_of(status(training_run, answer(job)), width=200))
    assert "9_[1,3,5,7,9,11,13,15,17,19,21,23,25,27,...] with 2,000 tasks (tokenize)" in plain


def test_nothing_controls_the_terminal(training_run: Path) -> None:
    write_events(training_run, "8", [end("failed", "\x1b]0;owned\x07\nDONE: fine")], restart=1)
    text = re.sub(r"\x1b\[\d*m", "", text_of(status(training_run, answer())))
    assert "\x1b" not in text
    assert "\\x1b]0;owned" in text


def test_an_attempt_is_done_once(training_run: Path) -> None:
    """The reasons of the trainer begin with the state."""
    write_events(training_run, "8", [end("done", "done: 200 iterations")])
    write_events(training_run, "9", [end("failed", "rank 3: killed")])
    text = re.sub(r"\x1b\[\d*m", "", text_of(status(training_run, answer()), width=120))
    assert ", done: 200 iterations" in text
    assert "done: done" not in text


def test_the_command_shows_several_runs(training_run: Path) -> None:
    shown = hpcgen("status", str(training_run), str(training_run))
    assert shown.status == 0
    assert shown.stdout.count("gpt: ") == 2
    assert "squeue is not installed here" in shown.stdout
    missing = hpcgen("status", str(training_run / "none"))
    assert (missing.status, "no such directory" in missing.stderr) == (2, True)


def test_the_guide_explains_every_key_of_json(training_run: Path) -> None:
    [found] = json.loads(hpcgen("status", str(training_run), "--json").stdout)
    assert set(found) == {field.name for field in dataclasses.fields(RunStatus)}
    table = GUIDE.read_text().partition("### For scripts")[2].partition("\n## ")[0]
    keys = {*found, *found["attempts"][0], *found["training"], *found["disk"]}
    assert sorted(key for key in keys if f"`{key}`" not in table) == []


def test_the_run_of_the_run_file_is_the_default(training_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(training_run)
    assert hpcgen("status").stdout.startswith("gpt: ")


def test_watching_ends_with_ctrl_c(training_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def interrupted_at_the_second(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(watching.time, "sleep", interrupted_at_the_second)
    shown = hpcgen("status", str(training_run), "--watch", "--interval", "0.5")
    assert (shown.status, waits) == (0, [0.5, 0.5])
    assert "gpt: " in shown.stdout


def test_a_run_file_without_a_directory_is_a_new_run(
    training_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = tmp_path / "not-yet"
    file = write_yaml(tmp_path / "mini.yaml", minimal_run(paths={"run_dir": str(absent)}))
    shown = hpcgen("status", str(file))
    assert (shown.status, shown.stdout.splitlines()[0].startswith("not-yet: new")) == (0, True)
    assert hpcgen("status", str(absent)).status == 2


def test_watching_has_no_json(training_run: Path) -> None:
    refused = hpcgen("status", str(training_run), "--watch", "--json")
    assert (refused.status, "--watch excludes --json" in refused.stderr) == (2, True)


def test_a_small_terminal_shows_the_first_lines(training_run: Path) -> None:
    found = status(training_run, answer(queued()))
    screen = watching.screen([found] * 20, NOW, 80, 24).plain.splitlines()
    assert len(screen) == 24
    assert re.fullmatch(r"\d+ more lines; \d\d:\d\d:\d\d, Ctrl-C ends", screen[-1])
