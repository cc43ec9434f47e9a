"""A run whose job was requeued after it lost a node, with everything that its two attempts recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.recorded_run import START, start, step, write_run

PHASES = {"imports": 20.0, "rendezvous": 5.0, "start": 10.0, "build": 5.0, "load": 30.0, "data": 10.0}
"""80 seconds."""


def event(kind: str, time: float, restart: int = 0, **values: str) -> dict[str, Any]:
    return {"event": kind, "time": START + time, "job": "12", "restart": restart, "stage": "train", **values}


def line(kind: str, iteration: int, time: float, **values: Any) -> dict[str, Any]:
    return {"event": kind, "iteration": iteration, "time": START + time, **values}


def training(iteration: int, time: float, restart: int, **values: Any) -> dict[str, Any]:
    """The start of a training whose process began 80 seconds before."""
    began = {"process_began": START + time - 80, "phases_s": PHASES}
    return start(iteration, START + time, job="12", restart=restart, **began, **values)


def write_jobs(directory: Path, *events: dict[str, Any], **machine: Any) -> None:
    job = directory / "jobs" / "12"
    job.mkdir(parents=True, exist_ok=True)
    (job / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    (job / "machine.json").write_text(json.dumps({"gpus_per_node": 8, **machine}))


def write_requeued_run(directory: Path) -> Path:
    """Two attempts of a job on two of three nodes. The first one lost a node, and with it steps 101 to 150."""
    lost = {"iteration": 150, "time": START + 938, "steps_s": 100.0, "data_wait_s": 1.0, "evaluation_s": 10.0}
    run = write_run(
        directory,
        [
            training(0, 600, restart=0),
            line("first_step", 1, 630, step_s=20.0),
            step(1, time=START + 630, step_time_s=20.0, startup_s=10.0, data_wait_s=0.0),
            *(step(n, time=START + 628 + 2 * n, data_wait_s=0.5) for n in range(2, 101)),
            line("checkpoint", 100, 830, path="iter_0000100", stall_s=3.0, write_s=9.0),
            training(100, 2000, restart=1, checkpoint="iter_0000100", lost=lost),
            line("first_step", 101, 2010, step_s=4.0),
            step(101, time=START + 2010, step_time_s=4.0, startup_s=6.0, data_wait_s=0.0),
            step(102, time=START + 2015, step_time_s=2.0, save_s=3.0, data_wait_s=0.0),
            line("stop", 102, 2015, reason="asked to stop (SIGUSR2)"),
            line("checkpoint", 102, 2020, path="iter_0000102", stall_s=5.0, write_s=9.0),
            line("end", 102, 2020, save_s=5.0),
        ],
    )
    (run / "STOPPED").write_text("102\n")
    write_jobs(
        run,
        event("start", 400, nodes="n[1-3]"),
        event("queue", 400, SubmitTime=f"{START:.0f}", EligibleTime=f"{START + 100:.0f}"),
        event("launch", 480, nodes="n1 n2"),
        event("end", 1000, verdict="requeued", status="0", reason="failed with status 3"),
        event("start", 1700, restart=1, nodes="n[1-3]"),
        event("queue", 1700, restart=1, SubmitTime=f"{START + 1001:.0f}", EligibleTime=f"{START + 1121:.0f}"),
        event("launch", 1800, restart=1, nodes="n1 n3"),
        event("end", 2030, restart=1, verdict="failed", status="1", reason="giving up"),
        price_per_gpu_hour=2.5,
        currency="EUR",
        gpu_idle_limit_s=250,
    )
    return run
