"""A check: something that a run needs, whether it is there, and what to do if not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from trainer.contract.record import record

State = Literal["ok", "warning", "failed", "skipped"]


@record
class Check:
    """The result of one check."""

    name: str
    """The subject of the check, such as Slurm's KillWait."""
    state: State
    found: str
    """The finding in one line. For a skipped check, the reason."""
    fix: str = ""
    """The fix for a warning or a failure."""


def any_failed(checks: Iterable[Check]) -> bool:
    """True if one of them failed."""
    return any(check.state == "failed" for check in checks)
