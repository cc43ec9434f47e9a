"""Attempts of a run's jobs, from the events that their batch scripts recorded (templates/lib/events.sh)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

from hpcgen.redaction import redact
from hpcgen.slurm.job_files import EVENTS, JOBS
from trainer.contract.files.regular_file import open_regular
from trainer.contract.files.shared_files import foreign_link
from trainer.contract.record import record

Verdict = Literal["done", "requeued", "stopped", "terminated", "failed"]
"""How an attempt ended: `stopped` by hpcgen stop; `terminated` is Slurm's decision (canceled, preempted, out of time,
or a node failed)."""

Event = Mapping[str, Any]

_END_BYTES = 8 << 10
"""Bytes that contain the last event, and usually all events of a task."""
_LATEST = 1e11
"""Latest time in an event, in the year 5138."""
_MOST_BYTES = 16 << 20
"""An attempt has some ten events of some hundred bytes. Others may be able to write a larger file."""


@record(kw_only=True)
class JobAttempt:
    """One attempt of a job: from the start of its batch script to its end. Times are Unix times in seconds."""

    job: str
    """Job ID, such as 1234, or 1234_5 for the task of an array."""
    restart: int
    """Number of times that the job was requeued before."""
    stage: str
    began: float
    events: tuple[Event, ...]
    """All events of the attempt in order, from `start` on."""
    queued_since: float | None = None
    """When the job came into the queue, at its submission or with its requeue."""
    eligible_since: float | None = None
    """When it could have started if nodes had been free."""
    ended: float | None = None
    """None if the attempt goes on, or if its script was killed."""
    verdict: Verdict | None = None
    """None without `ended`."""
    status: int | None = None
    """Exit status of the work, or of the batch script if the work succeeded or did not begin."""
    reason: str = ""
    """The script's last message: why the attempt ended. What looks like a secret is removed."""
    planned: bool = False
    """True if the work did not fail: it was asked to stop, or was out of time."""
    cause: str = ""
    """Why Slurm ended it, such as canceled, or "preempted, requeued, or a node failed"; "" if Slurm did not."""
    nodes: str = ""
    """The job's nodes in Slurm's notation."""
    cluster: str = ""
    """Slurm's name of the cluster."""


def read_attempts(run_dir: Path, jobs: Path | None = None) -> tuple[JobAttempt, ...]:
    """The attempts of all jobs of a run, in the order in which they began.

    Array tasks of the data stages are included. `jobs`: the directory of the jobs, by default RUN_DIR/jobs.

    Raises:
        OSError: a directory cannot be read.
    """
    directory = run_dir / JOBS if jobs is None else jobs
    if not directory.is_dir() or foreign_link(directory, run_dir) is not None:
        return ()
    found = [attempt for job_dir in directory.iterdir() for attempt in read_job(job_dir)]
    return tuple(sorted(found, key=lambda attempt: (attempt.began, attempt.job, attempt.restart)))


def read_job(job_dir: Path) -> tuple[JobAttempt, ...]:
    """The attempts of the job with this directory, oldest first; none without events that can be read."""
    path = job_dir / EVENTS
    try:
        if foreign_link(path, job_dir) is not None:
            return ()
        with open_regular(path) as file:
            data = file.read(_MOST_BYTES)
    except OSError:  # unread_records tells why
        return ()
    attempts: list[list[Event]] = []
    latest: dict[int, list[Event]] = {}
    for event in _events(data):
        if event["event"] == "start":  # a job of another cluster may have the same number
            latest[event["restart"]] = events = [event]
            attempts.append(events)
        elif event["restart"] in latest:
            latest[event["restart"]].append(event)
    return tuple(map(_attempt, attempts))


def read_end(job_dir: str) -> Event | None:
    """The event with which the job's last attempt ended; None without one.

    An array may have ten thousand tasks, so it takes three system calls and decodes a single line.
    """
    try:
        descriptor = os.open(f"{job_dir}/{EVENTS}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        data = os.read(descriptor, _END_BYTES)
        if len(data) == _END_BYTES:  # requeued often
            size = os.fstat(descriptor).st_size
            data = os.pread(descriptor, _END_BYTES, max(0, size - _END_BYTES))
    except OSError:  # a directory
        return None
    finally:
        os.close(descriptor)
    last = next(_events(data[data.rstrip().rfind(b"\n") + 1 :]), None)
    return last if last is not None and last["event"] == "end" else None


def _events(data: bytes) -> Iterator[Event]:
    """The events in the text of a file. A line may be torn, or written by someone else."""
    for line in data.splitlines():
        try:
            event = json.loads(line.decode(errors="replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and _is_event(event):
            yield event


def _is_event(event: Event) -> bool:
    """True for what the script can write: a number as the time, a count of restarts, and strings."""
    event = dict(event)
    time, restart = event.pop("time", None), event.pop("restart", None)
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time < _LATEST:
        return False
    names = {"event", "job", "stage"}
    return (
        type(restart) is int
        and names <= event.keys()
        and all(isinstance(each, str) for each in event.values())
    )


def _attempt(events: list[Event]) -> JobAttempt:
    start, nothing = events[0], dict[str, Any]()
    queue = next((event for event in events if event["event"] == "queue"), nothing)
    end = next((event for event in reversed(events) if event["event"] == "end"), nothing)
    verdict = end.get("verdict")
    return JobAttempt(
        job=start["job"],
        restart=start["restart"],
        stage=start["stage"],
        began=start["time"],
        events=tuple(events),
        queued_since=_number(queue.get("SubmitTime")),
        eligible_since=_number(queue.get("EligibleTime")),
        ended=end.get("time"),
        verdict=cast(Verdict, verdict) if verdict in get_args(Verdict) else None,
        status=None if (status := _number(end.get("status"))) is None else int(status),
        reason=redact(end.get("reason", "")),
        planned=end.get("planned") == "yes",
        cause=end.get("cause", ""),
        nodes=start.get("nodes", ""),
        cluster=start.get("cluster", ""),
    )


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "nan")
    except ValueError:
        return None
    return number if math.isfinite(number) else None
