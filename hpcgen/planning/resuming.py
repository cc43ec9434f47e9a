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


def weights_read(config: RunConfig) -> tuple[str, ...]:
    """The directories that a job with checkpoint.load reads: of its checkpoints and, if these contain adapters, of
    their model."""
    load = config.checkpoint.load
    if load is None:
        return ()
    from trainer.contract.files import checkpoint_files
    from trainer.contract.resuming import base_model

    directories = [checkpoints_read(load)]
    with contextlib.suppress(OSError):
        for path in checkpoint_files.paths_to_load(Path(load))[:1]:
            record = checkpoint_files.describe(path).record
            if record is not None and base_model.has_adapters(record):
                directories.append(checkpoints_read(base_model.path_of(record)))
    return tuple(dict.fromkeys(directories))


def model_of_adapters(config: RunConfig) -> tuple[str, ...]:
    """The directories that a job reads in addition to the checkpoints of a run, because these contain adapters."""
    return () if config.lora.rank is None else weights_read(config)


def resume_problems(config: RunConfig, trainer: TrainerConfig) -> list[Problem]:
    """Changes that the trainer would refuse when it resumes, and training that would be lost.

    `config` is the run file and `trainer` the configuration resolved from it. Empty without a checkpoint, and for a
    checkpoint of Megatron-LM or one that cannot be read here, which the trainer checks.
    """
    if is_first_job(trainer):
        return []
    from hpcgen.planning import continuation

    return [
        *continuation.changed_hyperparameters(config, trainer),
        *continuation.discarded_training(trainer),
    ]


def resume_warnings(trainer: TrainerConfig) -> list[Problem]:
    """Warnings about a run that has already finished, rotary frequencies, and names that are left over.

    Its configuration must have passed `resume_problems`.
    """
    if is_first_job(trainer):
        return []
    from hpcgen.planning import continuation

    return [
        *continuation.nothing_to_do(trainer),
        *continuation.unscaled_positions(trainer),
        *continuation.leftover_confirmations(trainer),
    ]


def continuation_of(trainer: TrainerConfig) -> Continuation | None:
    """The checkpoint that the trainer would start from, and what changes; None if this machine sees none."""
    if is_first_job(trainer):
        return None
    from hpcgen.planning import continuation

    return continuation.continuation(trainer)


def is_first_job(trainer: TrainerConfig) -> bool:
    """Returns True if this machine sees nothing to resume from."""
    directories = (trainer.run_dir, trainer.checkpoint.save, trainer.checkpoint.load)
    return not any(directory and os.path.exists(directory) for directory in directories)  # noqa: PTH110
