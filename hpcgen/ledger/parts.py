"""The parts that the time of a run is divided into."""

from __future__ import annotations

import enum


class Part(enum.Enum):
    """A kind of time. The value is its key in JSON."""

    PRODUCTIVE = "productive"
    REDONE = "redone"
    DATA_WAIT = "data_wait"
    EVALUATION = "evaluation"
    SAVE = "save"
    RESTORE = "restore"
    START_UP = "start_up"
    INFRASTRUCTURE = "infrastructure"
    ENDING = "ending"
    QUEUE = "queue"
    IDLE = "idle"
    UNACCOUNTED = "unaccounted"

    @property
    def label(self) -> str:
        """Name in tables and pictures."""
        return LABELS[self]


PARTS = tuple(Part)
LABELS = {
    Part.PRODUCTIVE: "productive steps",
    Part.REDONE: "steps redone",
    Part.DATA_WAIT: "waiting for data",
    Part.EVALUATION: "evaluations",
    Part.SAVE: "save stalls",
    Part.RESTORE: "restoring checkpoints",
    Part.START_UP: "start-up",
    Part.INFRASTRUCTURE: "node checks and requeues",
    Part.ENDING: "hanging or ending",
    Part.QUEUE: "queue wait",
    Part.IDLE: "between jobs",
    Part.UNACCOUNTED: "unaccounted",
}
