"""The section `notify`: a command that is told what happens to a training job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from hpcgen.config.program import Argument
from hpcgen.errors import Problem
from hpcgen.redaction import redact
from trainer.contract.config import Count, PositiveFloat
from trainer.contract.record import config_section

EventName = Literal[
    "start",
    "requeue",
    "restart",
    "spare",
    "exclude",
    "stall",
    "spike",
    "non_finite",
    "disk_low",
    "done",
    "failed",
    "stopped",
]
EVENT_NAMES: tuple[EventName, ...] = get_args(EventName)


@config_section
class NotifyConfig:
    """Command that is told what happens to the jobs of stage train or run."""

    command: tuple[Argument, ...]
    """Command and its arguments, as a list. No shell evaluates them. It gets one event at a time, as a JSON object on
    its standard input, and runs on the job's first node, outside of the container."""
    events: tuple[EventName, ...] = EVENT_NAMES
    """Events that the command gets. `non_finite` is the failure of a run whose loss or gradients are not finite, and
    `stopped` the end of a job that was asked to stop, canceled or preempted. Default: all."""
    timeout_s: Count = 30
    """Seconds that the command may take for an event. It is then killed."""
    stall_s: Count = 900
    """Seconds without a sign of progress after which a run has stalled."""
    disk_low_gb: PositiveFloat | None = None
    """Free space for checkpoints, in GB, below which `disk_low` is sent. Default: the size of two checkpoints. A
    program has no default."""


def problems(notify: NotifyConfig) -> Iterator[Problem]:
    """Yields mistakes in the section."""
    if not notify.command or not notify.command[0]:
        yield Problem("notify.command", "is empty", "set a list such as [python3, /home/me/notify.py]")
        return
    first = notify.command[0]
    if "/" in first and not first.startswith("/"):
        reason = "is a relative path, and the job may start in any directory"
        yield Problem("notify.command[0]", reason, "write its absolute path, or a command on PATH")
    # Together, since an option and its value are two arguments.
    if redact(" ".join(notify.command)) != " ".join(notify.command):
        reason = "contains a secret, which would be written into the script"
        hint = "put it into a file that only you can read, or into a variable that secrets names"
        yield Problem("notify.command", reason, hint)
