"""Settings of the command that is told what happens to a job (templates/lib/notify.sh)."""

from __future__ import annotations

import math

from hpcgen.config.run import RunConfig
from hpcgen.planning.checkpointing import checkpoint_bytes
from trainer.contract.config import TrainerConfig


def notification(config: RunConfig, trainer: TrainerConfig | None) -> dict[str, object]:
    """Settings of the section `notify`; none if the run file does not have it."""
    notify = config.notify
    if notify is None:
        return {}
    return {
        "notify_command": notify.command,
        "notify_events": notify.events,
        "notify_timeout_s": notify.timeout_s,
        "notify_stall_s": notify.stall_s,
        "notify_disk_low_gb": math.ceil(notify.disk_low_gb or _two_checkpoints_gb(trainer)),
    }


def _two_checkpoints_gb(trainer: TrainerConfig | None) -> float:
    """Space of the next two checkpoints. 0, which is never too little, if hpcgen's trainer does not save them."""
    if trainer is None:
        return 0.0
    size = checkpoint_bytes(trainer)
    return 2 * size / 1e9
