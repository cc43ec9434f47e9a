"""hpcgen sweep: what it plans, trains on this machine, repeats and compares. tests/slurm has the jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import Ended, hpcgen, listing

RUN = """\
name: mini
cluster: local
paths: {run_dir: run}
model: {num_layers: 1, hidden_size: 32, num_attention_heads: 2, seq_length: 32}
training: {micro_batch_size: 2, global_batch_size: 4, train_iters: 4, precision: fp32, eval_iters: 1}
optimizer: {lr: 1.0e-3, lr_decay_iters: 4, lr_warmup_iters: 1}
data: {mock: true, num_workers: 0}
"""
LR = ("--set", "optimizer.lr=1e-3,1e-2")


@pytest.fixture
def run_file(workplace: Path) -> Path:
    file = workplace / "run.yaml"
    file.write_text(RUN)
    return file


def local(*arguments: str) -> Ended:
    return hpcgen("sweep", *LR, "--launcher=local", *arguments)


def test_a_dry_run_shows_all_points_and_writes_nothing(run_file: Path) -> None:
    before = listing(run_file.parent)
    shown = local("--dry-run", "--set", "training.seed=1,2")
    assert shown.status == 0, shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines()[1:]]
    assert [row[:2] for row in rows] == [
        [f"lr-{lr}_seed-{seed}", "missing"] for lr in ("1e-3", "1e-2") for seed in (1, 2)
    ]
    assert all(row[2].startswith(f"run/sweep/{row[0]}-") for row in rows)
    assert "dry run: would submit 4 jobs for 4 points" in shown.stderr
    found = json.loads(local("--dry-run", "--json").stdout)["points"]
    assert [(each["name"], each["values"], each["state"], each["job"]) for each in found] == [
        (f"lr-{lr}", [f"optimizer.lr={lr}"], "missing", None) for lr in ("1e-3", "1e-2")
    ]
    assert listing(run_file.parent) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "optimizer.lr=1e-3"), "no setting has several values"),
        (("--set", "optimizer.lr=1,x"), "lr-x: --set optimizer.lr: optimizer.lr = x must be a number"),
        (("--set", "slurm.train.nodes=1,2", "--launcher=local"), "nodes-2: stage train requests 2 nodes"),
        (
            ("--set", "slurm.train.nodes=1,2", "--launcher=local", "--dry-run"),
            "nodes-2: stage train requests 2",
        ),
        (("--results",), "run/sweep: has no points of a sweep"),
        ((*LR, "--metric=train"), "--metric is for --results"),
        ((*LR, "--points=none", "--zip"), "--zip and --points exclude each other"),
        (("--points=none",), "none: no such file"),
    ],
)
def test_mistakes_submit_nothing(run_file: Path, arguments: tuple[str, ...], message: str) -> None:
    before = listing(run_file.parent)
    refused = hpcgen("sweep", *arguments)
    assert (refused.status, refused.stdout) == (2, "")
    assert message in refused.stderr
    assert listing(run_file.parent) == before


@pytest.mark.process
def test_one_failed_point_stops_no_other_and_both_are_trained_once(run_file: Path, forks: None) -> None:
    (run_file.parent / "points").write_text("model.init_method_std=1e+30\noptimizer.lr=1e-2\n")
    both = ("--points=points", "--launcher=local")
    first = hpcgen("sweep", *both)
    assert first.status == 1
    assert [line.split()[1] for line in first.stdout.splitlines()] == ["lr-1e-2"]
    assert "init_method_std-1e30: " in first.stderr
    assert "stage train failed" in first.stderr

    again = hpcgen("sweep", *both)
    assert (again.status, again.stdout) == (0, "")
    failed, done = again.stderr.splitlines()
    assert failed.startswith("init_method_std-1e30: failed: the loss is")
    assert failed.endswith("--retry repeats it")
    assert done == "lr-1e-2: done"

    rows = [line.split() for line in hpcgen("sweep", *both, "--results").stdout.splitlines()[1:]]
    assert [row[:2] for row in rows] == [["lr-1e-2", "done"], ["init_method_std-1e30", "failed"]]
    every = json.loads(hpcgen("sweep", "--results", "--json").stdout)
    assert (every["metric"], every["tokens"]) == ("valid", 4 * 4 * 32)
    assert [each["state"] for each in every["results"]] == ["done", "failed"]
