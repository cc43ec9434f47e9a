"""hpcgen ledger: what it prints, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.command import hpcgen
from tests.ledger.requeued_run import write_requeued_run
from tests.logs.logged_run import BEGAN, event, write_events, write_failed_run
from tests.recorded_run import start, steps, write_checkpoint, write_run

SHOWN = """\
gpt: 33 min 50 s from 2025-10-09 08:53:20 UTC to 2025-10-09 09:27:10 UTC
  productive steps              2 min 34 s    7.6%
  steps redone                  1 min 40 s    4.9%
  waiting for data                    50 s    2.4%
  evaluations                         10 s    0.5%
  save stalls                          8 s    0.4%
  restoring checkpoints               40 s    2.0%
  start-up                      5 min 16 s   15.6%
  node checks and requeues           5 min   14.8%
  hanging or ending             1 min 12 s    3.5%
  queue wait                   16 min 19 s   48.2%
goodput 17% of the time in jobs, 7.6% of all time
6.2 GPU-hours, 15.5 EUR
2 attempts, 50 steps redone; GPUs idle for 8 min 36 s before the first steps
1 interruption, one in 15 min 30 s in jobs (3 min 16 s to 5 h 2 min with 90% confidence)
saves every 2 min 5 s, each costs 4 s: 39% lost to saves and interruptions
least is lost with a save every 1 min 24 s: 39%
"""
"""Unaccounted and idle time below 0.05% is not shown."""


@pytest.fixture
def requeued(tmp_path: Path) -> Path:
    return write_requeued_run(tmp_path / "run")


def test_a_run_is_shown_in_lines_of_a_terminal(requeued: Path) -> None:
    ended = hpcgen("ledger", requeued)
    assert (ended.status, ended.stdout) == (0, SHOWN)
    assert ended.stderr == (
        "warning: job 12 held its GPUs for 5 min 6 s before the first step; the site allows 4 min 10 s "
        "(gpu_idle_limit_s of the profile)\n"
    )


def test_lost_metrics_are_told(requeued: Path) -> None:
    write_checkpoint(requeued / "checkpoints", 7777)
    (requeued / "metrics.jsonl").unlink()
    assert f"{requeued / 'metrics.jsonl'} is missing" in hpcgen("ledger", requeued).stderr


def test_json_has_parts_that_add_up(requeued: Path) -> None:
    found = json.loads(hpcgen("ledger", requeued, "--json").stdout)
    [run] = found["runs"]
    assert sum(found["total"]["parts"].values()) == pytest.approx(found["total"]["wall_s"])
    assert run["spent"] == found["total"]
    for part, seconds in found["total"]["parts"].items():
        assert sum(each["spent"]["parts"][part] for each in run["attempts"]) == pytest.approx(seconds)
    assert [attempt["reason"] for attempt in run["attempts"]] == ["failed with status 3", "giving up"]


def test_several_runs_have_a_total(requeued: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = write_run(tmp_path / "other" / "run", [start(0), *steps(1, 10, data_wait_s=0.0)], device="cpu")
    shown = hpcgen("ledger", requeued, other).stdout
    assert "\ntotal of 2 runs: 34 min 10 s\n  productive steps              2 min 54 s    8.5%\n" in shown


def test_a_time_without_a_job_is_said(requeued: Path) -> None:
    ended = hpcgen("ledger", requeued, "--since", "3d")
    assert ended.status == 0
    assert ended.stdout.startswith("gpt: nothing since ")
    assert "it ended 2025-10-09 09:27:10 UTC" in ended.stdout
    assert hpcgen("ledger", requeued, "--since", "yesterday").status == 2


def test_a_run_file_names_its_run_and_its_price(requeued: Path, tmp_path: Path) -> None:
    """The job recorded neither its price nor its GPUs, so those of the 16 ranks count."""
    (requeued / "jobs" / "12" / "machine.json").unlink()
    assert "GPU-hours, " not in hpcgen("ledger", requeued).stdout
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "uni.yaml").write_text(
        "extends: azure-ndv5\nprice_per_gpu_hour: 2\ncurrency: EUR\n"
    )
    run_file = tmp_path / "run.yaml"
    run_file.write_text(f"name: gpt\npreset: tiny\ncluster: uni\npaths: {{run_dir: {requeued}}}\n")
    ended = hpcgen("ledger", run_file)
    assert f"{16 * 930 / 3600:.4g} GPU-hours, {2 * 16 * 930 / 3600:.4g} EUR\n" in ended.stdout, ended


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "no attempt to account for"), (tmp_path / "absent", "no such directory")):
        ended = hpcgen("ledger", path)
        assert (ended.status, ended.stdout) == (2, "")
        assert reason in ended.stderr


@pytest.mark.process
def test_slurm_is_asked_once_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call took 75 ms for each of a thousand runs."""
    stand_in, calls = tmp_path / "sacct", tmp_path / "calls"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, job in (("a", "11"), ("b", "12")):
        run = write_failed_run(tmp_path / name)
        write_events(run, event("start", BEGAN + 100, job=job, nodes="n1"), job=job)
    assert hpcgen("ledger", tmp_path / "a", tmp_path / "b").status == 0
    [asked] = calls.read_text().splitlines()
    assert "--jobs=11,12" in asked
