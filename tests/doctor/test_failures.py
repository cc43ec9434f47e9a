"""What ended a run, from its logs: each has a page, the line that shows it, and what to do."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from hpcgen.doctor.diagnosis import diagnose
from hpcgen.doctor.run_files import read_run_files, with_answer
from hpcgen.runs.files import RunReader
from hpcgen.runs.slurm import NO_ACCOUNTS, Queue, QueuedJob
from tests.doctor.runs import JOB, write_events, write_run
from tests.recorded_run import START
from trainer.contract.record import replaced

CASES = {
    "out of memory": (
        "Traceback (most recent call last):\n"
        '  File "/code/trainer/step.py", line 140, in run\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.50 GiB. GPU 3 has a total capacity of 79 GiB",
        "gpu-memory",
        "faults.md#a-gpu-runs-out-of-memory",
    ),
    "NaN loss": (
        "trainer: the loss is nan at iteration 301 (samples 1200 to 1203; on rank 12); nothing of this step is saved",
        "not-finite",
        "faults.md#the-loss-is-not-a-number",
    ),
    "checkpoint loading": (
        "trainer: /runs/a/checkpoints holds no valid checkpoint, but /runs/a/metrics.jsonl records the checkpoint "
        "/runs/a/checkpoints/iter_0000300. The run would begin at iteration 0 and discard that training",
        "checkpoint",
        "faults.md#a-checkpoint-cannot-be-loaded",
    ),
    "NCCL timeout": (
        "[rank7]:[E1126 16:00:00.000000000 ProcessGroupNCCL.cpp:629] [Rank 7] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600002 "
        "milliseconds before timing out.",
        "collective-timeout",
        "faults.md#it-hangs",
    ),
    "host memory": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks have been OOM Killed.",
        "host-memory",
        "faults.md#a-node-or-a-process-died",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_root_failure_of_the_last_attempt_is_the_cause(tmp_path: Path, case: str) -> None:
    line, name, page = CASES[case]
    run = write_run(tmp_path / "run")
    (run / "STOPPED").unlink()
    end = {"verdict": "failed", "status": "1", "reason": "failed with status 1 (see above)"}
    write_events(run, ("start", {"nodes": "ndv5-[001-002]"}), ("end", end))
    log = [
        f"2025-10-09T08:53:20+0000 hpcgen: gpt: train job {JOB}, restart 0, on ndv5-[001-002]",
        "iteration 300/1000: loss 2.02",
        line,
        "trainer: rank 2 on ndv5-001 lost its peers after iteration 300 (train). See the log line of the rank",
    ]
    (run / f"train-{JOB}.log").write_text("\n".join(log) + "\n")
    [cause] = diagnose(read_run_files(run, START + 3600))
    assert (cause.name, cause.page) == (name, page)
    (run / "stacks").write_text("")
    also = diagnose(read_run_files(run, START + 3600))
    assert [(each.name, each.effect) for each in also] == [(name, "ended"), ("wrong-kind", "blocks")]
    assert cause.evidence[0].startswith(f"train-{JOB}.log:3: ")
    assert cause.fix


def test_slurm_s_answer_is_shown_for_an_attempt_without_an_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "STOPPED").unlink()
    write_events(run, ("start", {"nodes": "ndv5-[001-002]"}))
    files = replaced(
        read_run_files(run, START + 3600), is_active=False, slurm_says="Slurm: job 4711 is NODE_FAIL"
    )
    [cause] = diagnose(files)
    assert (cause.name, cause.evidence[-1]) == ("job-killed", "Slurm: job 4711 is NODE_FAIL")
    assert "If the job is gone" in cause.fix
    assert "still runs" not in cause.what
    assert "still runs" in diagnose(replaced(files, is_active=None, state="silent"))[0].what
    assert diagnose(replaced(files, is_active=True)) == ()
    (run / f"train-{JOB}.log").write_text("srun: error: ndv5-002: task 1: Killed\n")
    files = replaced(
        read_run_files(run, START + 3600), is_active=False, slurm_says="Slurm: job 4711 is NODE_FAIL"
    )
    [cause] = diagnose(files)
    assert cause.name == "killed"
    assert cause.evidence[-1] == "the attempt has no end; Slurm: job 4711 is NODE_FAIL"


@pytest.mark.parametrize(
    ("state", "expected", "causes"), [("RUNNING", "running", []), ("COMPLETED", "died", ["killed"])]
)
def test_the_state_is_that_of_status(tmp_path: Path, state: str, expected: str, causes: list[str]) -> None:
    """The rank that wrote the heartbeat was killed, and its job starts it again."""
    run = write_run(tmp_path / "run")
    (run / "STOPPED").unlink()
    beat = {
        "time": START + 600,
        "iteration": 300,
        "phase": "train",
        "host": socket.gethostname(),
        "pid": 2**30,
    }
    (run / "heartbeat").write_text(json.dumps(beat))
    write_events(run, ("start", {"nodes": "ndv5-[001-002]"}))
    (run / f"train-{JOB}.log").write_text("srun: error: ndv5-002: task 1: Killed\n")
    unknown: dict[str, Any] = dict.fromkeys(("submitted", "starts", "ends"))
    texts = dict.fromkeys(("reason", "nodes", "dependency", "user", "name"), "")
    job = QueuedJob(job=JOB, state=state, log=str(run / f"train-{JOB}.log"), **unknown, **texts)
    now = START + 700
    files = read_run_files(run, now)
    assert files.state == "died"
    files = with_answer(files, RunReader(run).read(now), Queue(jobs=(job,), asked=now), NO_ACCOUNTS)
    assert (files.state, [cause.name for cause in diagnose(files)]) == (expected, causes)
