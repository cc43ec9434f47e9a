"""`hpcgen tune` on a real Slurm: trials that are measured, do not fit, die and hang, each in a step of its own."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from hpcgen import api
from tests.patience import PATIENCE_S
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import HPCGEN, hpcgen

LAYER = """\
import os, signal, time
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

def dies(*_):
    if os.environ["SLURM_PROCID"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return get_gpt_layer_local_spec()

def hangs(*_):
    if os.environ["SLURM_PROCID"] == "1":
        time.sleep(3600)
    return get_gpt_layer_local_spec()
"""
"""Layers of a user, with which the second rank dies or hangs."""

TP2 = "parallelism.tensor_model_parallel_size=2 parallelism.sequence_parallel=true"
TOO_LARGE = f"model.ffn_hidden_size={2**42}"
"""No address space is large enough for these weights."""
DIES, HANGS = (f"model.layer_spec=layer.py:{name}" for name in ("dies", "hangs"))


@pytest.fixture
def run(tiny_run: Path) -> Path:
    """A run on two nodes, next to the layers."""
    text = tiny_run.read_text()
    nodes = 'slurm: {train: {nodes: 2, ntasks_per_node: 1, time: "5:00"}}'
    tiny_run.write_text(text.replace('slurm: {train: {time: "5:00"}}', nodes))
    assert nodes in tiny_run.read_text()
    (tiny_run.parent / "layer.py").write_text(LAYER)
    return tiny_run


def settings(*candidates: str) -> list[str]:
    return [f"tune.candidates={json.dumps(candidates)}", "tune.steps=2", "tune.warmup_steps=1"]


def interrupted(arguments: tuple[str, ...], cluster: SlurmCluster, run: Path) -> str:
    """Submits the job and interrupts the command, which leaves the job running. Returns its ID."""
    process = subprocess.Popen(
        [*HPCGEN, *arguments], cwd=run.parent, env=cluster.env, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    submitted = next(line for line in process.stderr if line.startswith("submitted job "))
    assert any("Ctrl-C leaves the job running" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=PATIENCE_S)
    job_id = submitted.split()[2].rstrip(",")
    assert process.returncode == 130
    assert f"job {job_id} continues; to follow it: " in rest
    return job_id


def test_trials_that_fail_leave_the_others_and_are_not_repeated(
    slurm_cluster: SlurmCluster, run: Path
) -> None:
    words = [word for each in settings(TP2, TOO_LARGE, DIES) for word in ("--set", each)]

    arguments = ("tune", "-c", run.name, *words, "--json", "--no-write")

    job_id = interrupted(arguments, slurm_cluster, run)
    found = json.loads(hpcgen(*arguments, cwd=run.parent, env=slurm_cluster.env))
    by_overrides = {" ".join(trial["overrides"]): trial["result"] for trial in found["trials"]}
    own, parallel, too_large, dead = (by_overrides[text] for text in ("", TP2, TOO_LARGE, DIES))
    assert {own["job"], parallel["job"], too_large["job"], dead["job"]} == {job_id}
    assert own["status"] == parallel["status"] == "measured"
    assert own["nodes"] == parallel["nodes"]
    assert len(own["nodes"]) == 2
    assert too_large["status"] == "out of memory"
    assert "does not fit: " in too_large["reason"]
    assert dead["status"] == "lost"
    assert dead["reason"].startswith("the ranks ended with status ")
    log = (run.parent / f"run/tune-{job_id}.log").read_text()
    assert log.index("calibration: ") < log.index("trial 1 of 4: ")
    assert (run.parent / "cluster.measured.json").exists()
    # a second job has only what the first one did not have, and a short time for it
    plan = api.plan(api.load_run(run, settings(TP2, HANGS)), ["tune"])
    script = api.render(plan, "tune").replace('"time_limit_s": 600', '"time_limit_s": 1')
    second = slurm_cluster.sbatch(script, cwd=run.parent)
    assert slurm_cluster.wait(second) == "COMPLETED"
    results = [json.loads(path.read_text()) for path in run.parent.glob("run/tune/*.json")]
    [hung] = [result for result in results if result.get("status") == "hung"]
    assert hung["job"] == second
    assert hung["reason"].startswith("no result after 1 s; rank ")
    log = (run.parent / f"run/tune-{second}.log").read_text()
    assert log.count("measured before") == 2
    assert "hpcgen: measured 2 of 3 trials; results: " in log
