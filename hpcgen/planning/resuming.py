"""What a run goes on from, as far as this machine sees it.

The first job of a run, as most scripts are rendered for, needs nothing of the trainer's checkpoints: what reads them is
imported where there are some.
"""

from __future__ import annotations

import contextlib
import os.path
from collections.abc import Callable
from pathlib import Path

from hpcgen.config.run import RunConfig
from hpcgen.errors import Problem
from trainer.contract.config import TrainerConfig


def proof_of_checkpoints(load: str) -> str:
    """The file that shows that the directory `load` holds checkpoints: the tracker, or, as in an archive that has none,
    the record of the newest checkpoint."""
    from trainer.contract.checkpoint_files import COMPLETE, TRACKER, list_paths

    tracker = Path(load, TRACKER)
    with contextlib.suppress(OSError):
        if not tracker.exists():
            for path in list_paths(Path(load)):
                if (path / COMPLETE).exists():
                    return str(path / COMPLETE)
    return str(tracker)


def no_checkpoints(load: str, exists: Callable[[str], bool]) -> Problem:
    """What to say of a directory `load` that holds none; one beside it may be meant."""
    from trainer.contract.checkpoint_files import COMPLETE, TRACKER

    if exists(f"{load}/checkpoints"):
        hint = f"did you mean {load}/checkpoints?"
    elif exists(f"{load}/{COMPLETE}"):
        hint = f"did you mean {os.path.dirname(load)}?"  # noqa: PTH120
    else:
        hint = "name the directory that holds iter_... directories"
    why = f"has neither {TRACKER} nor iter_.../{COMPLETE}" if exists(load) else "is not there"
    return Problem("checkpoint.load", f"holds no checkpoint for stage train: {load} {why}", hint)


def changed_hyperparameters(config: RunConfig, trainer: TrainerConfig) -> list[Problem]:
    """The hyperparameters that the trainer would refuse to change from those of the checkpoint that it finds first.

    `config` is the run file, `trainer` what comes of it. Without a checkpoint, with one that cannot be read here, and
    with Megatron-LM's, there are none: the trainer checks.
    """
    if _is_first_job(trainer):
        return []
    from hpcgen.planning import continuation

    return continuation.changed_hyperparameters(config, trainer)


def discarded_training(trainer: TrainerConfig) -> list[Problem]:
    """The trainer's refusal to begin before training that the run has saved, if it would refuse.

    There is none where this machine does not see the directory of the checkpoints.
    """
    if _is_first_job(trainer):
        return []
    from hpcgen.planning import continuation

    return continuation.discarded_training(trainer)


def nothing_to_do(trainer: TrainerConfig) -> list[Problem]:
    """A warning where the run is finished already; its configuration has passed `changed_hyperparameters`."""
    if _is_first_job(trainer):
        return []
    from hpcgen.planning import continuation

    return continuation.nothing_to_do(trainer)


def _is_first_job(trainer: TrainerConfig) -> bool:
    """Whether this machine sees nothing to go on from."""
    directories = (trainer.run_dir, trainer.checkpoint.save, trainer.checkpoint.load)
    return not any(directory and os.path.exists(directory) for directory in directories)  # noqa: PTH110
