"""Run directories with the log of a failed job, for the programs that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.logs.cases import DIRECTORY, read

BEGAN = 1_795_708_000.0


def event(name: str, time: float = BEGAN, restart: int = 0, job: str = "7", **values: str) -> str:
    """A line of events.jsonl."""
    known: dict[str, Any] = {"event": name, "time": time, "job": job, "restart": restart, "stage": "train"}
    return json.dumps(known | values)


def write_events(run: Path, *events: str, job: str = "7") -> None:
    """Appends events of a job."""
    directory = run / "jobs" / job
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "events.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in events)


def write_failed_run(run: Path, case: str = "kill") -> Path:
    """The directory of a run whose only job left the log of a case."""
    found = read(DIRECTORY / f"{case}.txt")
    run.mkdir(parents=True)
    (run / "train-7.log").write_text(found.log)
    launch = event("launch", nodes=" ".join(found.nodes), ranks=str(found.world_size))
    end = event("end", BEGAN + 60, verdict="failed", status="137", reason="failed with status 137")
    write_events(run, event("start", nodes="ndv5-[1-2]"), launch, end)
    return run
