"""A cause: something that stopped, slowed or may stop a run, with the evidence and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from trainer.contract.record import record

Effect = Literal["blocks", "ended", "costs", "harmless"]
"""`blocks`: the next attempt would fail. `ended`: the last attempt ended because of it. `costs`: it costs time or
quality. `harmless`: it explains what somebody may stumble over."""

_ORDER = {effect: index for index, effect in enumerate(get_args(Effect))}


@record(kw_only=True)
class Cause:
    """A finding in a run's directory."""

    name: str
    """Word for scripts, which stays the same: disk-full."""
    effect: Effect
    what: str
    """The cause in one line."""
    evidence: tuple[str, ...]
    """Where it shows: a file with its line, or figures. Never empty."""
    fix: str
    page: str
    """Section of the documentation that explains it: faults.md#the-disk-is-full."""


def most_likely_first(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Sorts by effect. Causes of one effect keep their order."""
    return tuple(sorted(causes, key=lambda cause: _ORDER[cause.effect]))
