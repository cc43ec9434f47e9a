"""Checks of the checkpoint from which a run resumes, if this machine sees it.

Most scripts are rendered for the first job of a run, which has no checkpoints. The code that reads checkpoints is
therefore imported only if there are some.
"""

from __future__ import annotations

import contextlib
import os.path
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.config.run import RunConfig
from hpcgen.errors import Problem
from trainer.contract.config import TrainerConfig

if TYPE_CHECKING:
    from hpcgen.planning.continuation import Continuation
    from hpcgen.planning.mixture import Reading


def proof_of_checkpoints(load: str) -> str:
    """The file that proves that checkpoint.load names checkpoints: the tracker or, in an archive without one, the
    record of the newest checkpoint. For a single checkpoint, its record or, for Megatron-LM's, the tracker."""
    from trainer.contract.files.checkpoint_files import COMPLETE, METADATA, TRACKER, iteration_of, list_paths

    if iteration_of(Path(load)) is not None:
        is_foreign = Path(load, METADATA).exists() and not Path(load, COMPLETE).exists()
        return str(Path(load).parent / TRACKER if is_foreign else Path(load, COMPLETE))
    tracker = Path(load, TRACKER)
    with contextlib.suppress(OSError):
        if not tracker.exists():
            for path in list_paths(Path(load)):
                if (path / COMPLETE).exists():
                    return str(path / COMPLETE)
    return str(tracker)


def checkpoints_read(load: str) -> str:
    """The directory that a job with checkpoint.load reads. The tracker next to a single checkpoint belongs to it."""
    from trainer.contract.files.checkpoint_files import directory_of

    return str(directory_of(Path(load)))


def changed_hyperparameters(config: RunConfig, trainer: TrainerConfig) -> list[Problem]:
    """Changes of hyperparameters that the trainer would refuse, compared with the checkpoint that it would load.

    `config` is the run file and `trainer` the configuration resolved from it. Empty without a checkpoint, and for a
    checkpoint of Megatron-LM or one that cannot be read here, which the trainer checks.
    """
    if _is_first_job(trainer):
        return []
    from hpcgen.planning import continuation

    return continuation.changed_hyperparameters(config, trainer)


def pair_readings(trainer: TrainerConfig) -> list[Reading]:
    """Samples of each pair that the training has read and will read. Empty if this machine does not see all pairs, or
    cannot tell where the training continues."""
    from hpcgen.planning import mixture

    try:
        if _is_first_job(trainer):
            return mixture.readings(trainer, None)
        from hpcgen.planning import continuation

        if continuation.continues_from_unknown(trainer):
            return []
        return mixture.readings(trainer, continuation.resumed_record(trainer))
    except OSError:
        return []


def discarded_training(trainer: TrainerConfig) -> list[Problem]:
    """The problem if the trainer would refuse to start before an iteration that the run has already saved.

    Empty if this machine does not see the checkpoint directory.
    """
    if _is_first_job(trainer):
        return []
    from hpcgen.planning import continuation

    return continuation.discarded_training(trainer)


def nothing_to_do(trainer: TrainerConfig) -> list[Problem]:
    """A warning if the run is already finished. Its configuration must have passed `changed_hyperparameters`."""
    if _is_first_job(trainer):
        return []
    from hpcgen.planning import continuation

    return continuation.nothing_to_do(trainer)


def unscaled_positions(trainer: TrainerConfig) -> list[Problem]:
    """A warning if the rotary frequencies do not fit sequences longer than those of the loaded weights."""
    if _is_first_job(trainer):
        return []
    from hpcgen.planning import continuation

    return continuation.unscaled_positions(trainer)


def leftover_confirmations(trainer: TrainerConfig) -> list[Problem]:
    """Warnings about entries of checkpoint.changed that earlier attempts have used."""
    if _is_first_job(trainer):
        return []
    from hpcgen.planning import continuation

    return continuation.leftover_confirmations(trainer)


def continuation_of(trainer: TrainerConfig) -> Continuation | None:
    """The checkpoint that the trainer would start from, and what changes; None if this machine sees none."""
    if _is_first_job(trainer):
        return None
    from hpcgen.planning import continuation

    return continuation.continuation(trainer)


def _is_first_job(trainer: TrainerConfig) -> bool:
    """Returns True if this machine sees nothing to resume from."""
    directories = (trainer.run_dir, trainer.checkpoint.save, trainer.checkpoint.load)
    return not any(directory and os.path.exists(directory) for directory in directories)  # noqa: PTH110
