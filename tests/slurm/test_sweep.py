"""hpcgen sweep on a real Slurm: a job for each point that is missing, and at most some of them at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import hpcgen
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import profile_text

PROGRAM = """\
name: mine
cluster: ./cluster.yaml
paths: {run_dir: run}
slurm: {run: {time: "10:00", max_restarts: 0}}
program: {command: [sh, -c, 'echo "lr $LR"; [ "$LR" != 2 ] || exit 1; while [ ! -e go ]; do sleep 0.1; done']}
"""


def test_only_missing_points_are_submitted_and_some_wait_for_others(
    slurm_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in slurm_cluster.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text(profile_text())
    (tmp_path / "run.yaml").write_text(PROGRAM)

    first = hpcgen("sweep", "--set", "environment.LR=1,2,3", "--max-running=2")
    assert first.status == 0, first.stderr
    jobs = {line.split()[1]: line.split()[0] for line in first.stdout.splitlines()}
    assert list(jobs) == ["LR-1", "LR-2", "LR-3"]
    assert slurm_cluster.show(jobs["LR-3"])["Dependency"].startswith(f"afterany:{jobs['LR-1']}")
    assert slurm_cluster.wait(jobs["LR-2"]) == "FAILED"

    again = hpcgen("sweep", "--set", "environment.LR=1,2,3", "--json")
    assert again.status == 0, again.stderr
    [submitted] = json.loads(again.stdout)["submitted"]
    assert (submitted["name"], submitted["values"]) == ("LR-2", ["environment.LR=2"])
    assert f"LR-3: job {jobs['LR-3']} waits for its dependency {jobs['LR-1']}" in again.stderr

    chained = (
        "--set",
        "environment.LR=8,9",
        "--set",
        "slurm.run.chain=2",
        "--set",
        "slurm.run.max_restarts=null",
    )
    refused = hpcgen("sweep", *chained, "--max-running=1")
    assert (refused.status, refused.stdout) == (2, "")
    assert "slurm.run.chain = 2 lets jobs follow each other, so no point can wait for run" in refused.stderr

    (tmp_path / "go").touch()
    for job in jobs.values():
        slurm_cluster.wait(job)
    logs = [path.read_text() for path in sorted((tmp_path / "run/sweep").glob("LR-*/run-*.log"))]
    assert [f"0: lr {number}\n" in log for number, log in zip("1223", logs, strict=True)] == [True] * 4
    slurm_cluster.wait(submitted["job"])
    last = hpcgen("sweep", "--set", "environment.LR=1,3")
    assert (last.status, last.stdout) == (0, "")
    assert last.stderr.splitlines() == ["LR-1: done", "LR-3: done"]
