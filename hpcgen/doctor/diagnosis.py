"""Diagnosis of a run: all causes that its directory shows, the most likely ones first."""

from __future__ import annotations

from hpcgen.doctor import checkpoints, directory, failure, learning, markers, speed
from hpcgen.doctor.cause import Cause, most_likely_first
from hpcgen.doctor.run_files import RunFiles
from trainer.contract.record import replaced

KINDS = (failure, markers, directory, checkpoints, speed, learning)
"""Modules whose `causes` yields causes of one kind."""


def diagnose(files: RunFiles) -> tuple[Cause, ...]:
    """The causes that a run's files show. Why it ended comes before what may stop the next attempt."""
    found = [(kind, cause) for kind in KINDS for cause in kind.causes(files)]
    if files.state == "done":  # what slowed it costs nothing any more
        found = [
            (kind, replaced(cause, effect="harmless") if kind is speed else cause) for kind, cause in found
        ]
    ended = tuple(cause for kind, cause in found if kind is failure)
    return (*ended, *most_likely_first(cause for kind, cause in found if kind is not failure))
