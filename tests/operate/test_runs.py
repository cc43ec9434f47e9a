"""Run directories are found without a look into them, and listed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpcgen.runs.files import RunFiles, RunReader
from hpcgen.runs.find import find_runs, has_job
from hpcgen.runs.listing import list_runs
from hpcgen.runs.node_lists import node_names
from tests.cli.command import hpcgen
from tests.operate.test_status import NOW, end, write_events
from tests.recorded_run import start, steps, write_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a training run, a run of data stages, a corpus, and other things."""
    write_run(tmp_path / "a" / "gpt", [start(), *steps(1, 300)])
    write_events(tmp_path / "a" / "gpt", "4711", [end("failed", "no space left")])
    (tmp_path / "a" / "gpt" / "checkpoints" / "old" / "jobs" / "1").mkdir(parents=True)
    write_events(tmp_path / "b" / "c" / "data", "9_3", [end("done")], stage="prepare")
    (tmp_path / "corpus" / "tokens").mkdir(parents=True)
    (tmp_path / "corpus" / "tokens" / "metrics.jsonl").touch()
    (tmp_path / "corpus" / "manifest.jsonl").touch()
    (tmp_path / "shop" / "jobs" / "plumber").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.setenv("PATH", str(tmp_path))  # without Slurm
    return tmp_path


def test_only_run_directories_are_found(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (opened.append(str(path)), real(path))[1])
    found = find_runs(runs, depth=4)
    assert found.directories == (runs / "a" / "gpt", runs / "b" / "c" / "data")
    assert not any("checkpoints" in path or "tokens" in path for path in opened)
    assert find_runs(runs, depth=2).directories == (runs / "a" / "gpt",)
    assert find_runs(runs / "a" / "gpt", depth=0).directories == (runs / "a" / "gpt",)


def test_directories_of_others_are_counted(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = find_runs(runs, depth=4)
    assert (found.directories, found.closed) == ((runs / "a" / "gpt",), 1)


def test_jobs_are_found_by_their_directories(runs: Path) -> None:
    data = runs / "b" / "c" / "data"
    assert [job for job in ("9", "9_3", "9_4", "3", "93") if has_job(data, job)] == ["9", "9_3"]


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("gpu-[001-003,7],login", {"gpu-001", "gpu-002", "gpu-003", "gpu-7", "login"}),
        ("r[1-2]n[1-2]", {"r1n1", "r1n2", "r2n1", "r2n2"}),
        ("gpu-1 gpu-2", {"gpu-1", "gpu-2"}),
        ("gpu-1,gpu-2", {"gpu-1", "gpu-2"}),
        ("", set()),
        ("x[1-99999999],x[a-b],y[", set()),
        ("x[1-90000][1-90000],x[1-90000,1-90000]", set()),
        ("x" + "[1]" * 2000, {"x" + "1" * 2000}),
    ],
)
def test_names_of_nodes(nodes: str, names: set[str]) -> None:
    assert node_names(nodes) - {"y"} == names


@pytest.mark.process
def test_runs_are_listed(runs: Path) -> None:
    listed = hpcgen("runs", str(runs))
    lines = listed.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["state", "failed", "done"]
    assert "300 of 1,000 (30.0%)" in lines[1]
    assert lines[1].endswith("  a/gpt")
    assert "squeue is not installed here" in listed.stderr
    assert "a/gpt" not in hpcgen("runs", str(runs), "--state", "done").stdout
    assert "no run found" in hpcgen("runs", str(runs), "--user", "nobody-else").stderr


@pytest.mark.process
def test_one_unreadable_run_does_not_hide_the_others(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = RunReader.read

    def refuse(reader: RunReader, now: float) -> RunFiles:
        found = real(reader, now)
        if found.name == "data":
            raise PermissionError(13, "Permission denied", "x")
        return found

    monkeypatch.setattr(RunReader, "read", refuse)
    listed = list_runs(runs, 4, NOW)
    assert [run.name for run in listed.runs] == ["gpt"]
    assert any(str(runs / "b" / "c" / "data") in problem for problem in listed.problems)


@pytest.mark.process
def test_the_run_of_a_job(runs: Path) -> None:
    found = json.loads(hpcgen("runs", str(runs), "--job", "9_3", "--json").stdout)
    assert [run["directory"] for run in found] == [str(runs / "b" / "c" / "data")]
    assert json.loads(hpcgen("runs", str(runs), "--job", "12", "--json").stdout) == []
    refused = hpcgen("runs", "--job", "gpt")
    assert (refused.status, "is not a job ID" in refused.stderr) == (2, True)


@pytest.mark.process
def test_the_run_on_a_node(runs: Path) -> None:
    """Slurm does not answer, so that only files tell."""
    assert json.loads(hpcgen("runs", str(runs), "--node", "n2", "--json").stdout) == []
    write_events(runs / "a" / "gpt", "4712", [("launch", {"nodes": "n1 n2"})], restart=1)
    found = json.loads(hpcgen("runs", str(runs), "--node", "n2", "--json").stdout)
    assert [run["name"] for run in found] == ["gpt"]
    assert json.loads(hpcgen("runs", str(runs), "--node", "n3", "--json").stdout) == []
