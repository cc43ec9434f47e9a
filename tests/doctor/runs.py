"""Run directories for the doctor: a finished step, checkpoints, a job with its configuration and events."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from hpcgen.planning.config_text import config_text
from tests.recorded_run import START, start, step, steps, write_checkpoint
from tests.runs import minimal_run, planned
from trainer.contract.config import TrainerConfig, fingerprint, from_dict

LAST = 300
JOB = "4711"


@functools.cache
def _config() -> str:
    """The trainer's configuration of a tiny run, as a job has it."""
    with tempfile.TemporaryDirectory() as directory:
        training = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 1000, "precision": "fp32"}
        trainer = planned(Path(directory), minimal_run(training=training)).trainer
    assert trainer is not None
    return config_text(trainer)


def configuration(**sections: Any) -> dict[str, Any]:
    """The trainer's configuration of a tiny run of 1,000 steps, with other values in `sections`."""
    values: dict[str, Any] = json.loads(_config())
    for name, section in sections.items():
        values[name] = {**values[name], **section} if isinstance(section, dict) else section
    return values


def finished_marker(iteration: int, **sections: Any) -> str:
    """The text of DONE after the training of `configuration`."""
    config = from_dict(TrainerConfig, configuration(**sections), where="trainer.json")
    return f"{iteration}\n{fingerprint(config)}\n"


def write_run(directory: Path) -> Path:
    """A run that stopped after 300 of 1,000 steps, with two checkpoints and a job that is in the queue again."""
    job = directory / "jobs" / JOB
    job.mkdir(parents=True)
    (job / "trainer.json").write_text(json.dumps(configuration()))
    (directory / "trained-with.json").write_text(json.dumps(configuration()))
    events = [start(job=JOB, restart=0), *steps(1, LAST)]
    for iteration in (200, 300):
        path = write_checkpoint(directory / "checkpoints", iteration)
        events.append({**step(iteration), "event": "checkpoint", "path": str(path), "stall_s": 1.0})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (directory / "RUNNING").write_text(f"{JOB}\n")
    (directory / "heartbeat").write_text(
        json.dumps({"time": START + 600, "iteration": LAST, "phase": "end", "host": "ndv5-001", "pid": 7})
    )
    write_events(directory, ("start", {"nodes": "ndv5-[001-002]"}), ("end", {"verdict": "requeued"}))
    (directory / "STOPPED").write_text(f"{LAST}\n")
    return directory


def write_events(directory: Path, *events: tuple[str, dict[str, str]], job: str = JOB) -> None:
    """The events of a job, as its batch script records them."""
    lines = [
        {"event": name, "time": START + second, "job": job, "restart": 0, "stage": "train", **values}
        for second, (name, values) in enumerate(events)
    ]
    path = directory / "jobs" / job / "events.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
