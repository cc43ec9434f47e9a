"""DeepSpeed as the program of stage run on two real Slurm nodes, without GPUs; needs DEEPSPEED_PYTHON.

tests/examples/deepspeed.py says how to set it. Each start takes seconds, so the tests are slow.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.examples.deepspeed import EXAMPLES, PYTHON, losses, needs_deepspeed
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import hpcgen, profile_text
from tests.slurm.test_run import log_of, submit

pytestmark = [pytest.mark.slow, needs_deepspeed]
LIMIT_S = 900
OPERATIONS = os.environ.get("TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache/torch_extensions"))


def local_run(directory: Path, *more: str, **slurm: Any) -> Path:
    """local.yaml on two nodes, with its tokens, the Python with DeepSpeed, and compiled operations."""
    shutil.copytree(EXAMPLES, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs", "data"))
    values = yaml.safe_load((EXAMPLES / "local.yaml").read_text())
    values["cluster"] = "./cluster.yaml"
    values["paths"] = {"run_dir": "run"}
    values["slurm"]["run"] |= {"nodes": 2, "ntasks_per_node": 1, **slurm}
    program = values["program"]
    words = [word.replace("runs/local", "run") for word in program["command"]]
    words[words.index("python3")] = PYTHON
    words[1] = f"TORCH_EXTENSIONS_DIR={OPERATIONS}"
    program |= {"command": [*words, *more], "progress": {"file": "run/checkpoints/latest"}}
    run = directory / "run.yaml"
    run.write_text(json.dumps(values))
    (directory / "cluster.yaml").write_text(profile_text())
    (directory / "run").mkdir()
    hpcgen("data", "sample", "text/corpus.jsonl.zst", "--max-mb=0.2", cwd=directory)
    hpcgen("data", "plan", "-c", "run.yaml", cwd=directory)
    hpcgen("submit", "prepare", "-c", "run.yaml", "--launcher", "local", cwd=directory)
    return run


def wait_for_step(run: Path, job_id: str, step: int) -> None:
    end = time.monotonic() + LIMIT_S
    while not any(run.parent.glob(f"run/run-{job_id}.log")) or f"step {step} of" not in log_of(run, job_id):
        assert time.monotonic() < end
        time.sleep(0.1)


def ended(cluster: SlurmCluster, run: Path, job_id: str, state: str) -> str:
    found = cluster.wait(job_id, timeout_s=LIMIT_S)
    log = log_of(run, job_id)
    assert found == state, log
    return log


def test_a_killed_rank_and_a_warning_leave_the_curve_as_it_is(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """kill -9 of a rank in the first attempt, the warning in the second one, and the third one is done."""
    run = local_run(tmp_path, "--steps=120")
    job_id = submit(slurm_cluster, run)
    wait_for_step(run, job_id, 12)
    find = ["pgrep", "-f", f"{PYTHON} pretrain.py .*{tmp_path}"]
    ranks = subprocess.run(find, capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(ranks[0]), signal.SIGKILL)
    wait_for_step(run, job_id, 25)
    slurm_cluster.run("scancel", "--batch", "--signal=USR2", job_id)
    log = ended(slurm_cluster, run, job_id, "COMPLETED")
    assert re.search(r"failed with status \d+ at progress \d+ .*back into the queue \(restart 1 of", log)
    assert "stopped with status 0 before the time limit at progress " in log
    assert log.endswith("hpcgen: done at progress 120\n")
    assert all(f"resuming at step {step}" in log for step in re.findall(r"stopped .* at progress (\d+)", log))
    # A step that was trained twice had the same loss both times.
    repeated: dict[int, set[float]] = {}
    for line in log.splitlines():
        for step, loss in losses(line).items():
            repeated.setdefault(step, set()).add(loss)
    assert sorted(repeated) == list(range(1, 121))
    assert all(len(found) == 1 for found in repeated.values())


def test_three_attempts_without_progress_end_the_job(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """A model file that does not exist: every attempt fails before its first step."""
    run = local_run(tmp_path, "--model=models/absent.json")
    log = ended(slurm_cluster, run, submit(slurm_cluster, run), "FAILED")
    assert "three attempts without progress" in log
    assert log.count("back into the queue") == 2


def test_a_spare_takes_the_place_of_a_bad_node(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    run = local_run(tmp_path, nodes=1)
    check = tmp_path / "check-node"
    check.write_text('#!/bin/sh\n[ "$SLURMD_NODENAME" != ndv5-1 ] || { echo sick; exit 1; }\n')
    check.chmod(0o755)
    with (tmp_path / "cluster.yaml").open("a") as profile:
        profile.write(f"health_command: [{check}]\n")
    log = ended(slurm_cluster, run, submit(slurm_cluster, run, "preflight.spare_nodes=1"), "COMPLETED")
    assert "hpcgen: running on ndv5-2\n" in log
    assert "step 40 of 40" in log


def test_a_command_that_does_not_exist_is_tried_once(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    run = local_run(tmp_path)
    values = json.loads(run.read_text())
    values["program"]["command"] = ["no-such-python", "--deepspeed_config={DEEPSPEED_CONFIG}"]
    run.write_text(json.dumps(values))
    log = ended(slurm_cluster, run, submit(slurm_cluster, run), "FAILED")
    assert "not requeued, since it would fail again: the command no-such-python does not exist" in log
