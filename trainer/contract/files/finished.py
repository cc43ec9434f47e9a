"""Finished runs: checks whether a configuration asks for training that is already done."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.contract.code.user_code import UserCode
from trainer.contract.config import TrainerConfig, fingerprint
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import Checkpoint
from trainer.contract.files.regular_file import IrregularFileError, read_text
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.resuming import hyperparameters, provenance
from trainer.contract.resuming.confirmations import Confirmations
from trainer.contract.wording import STOPPED_EARLY


def is_done(run: RunDirectory, config: TrainerConfig, codes: Mapping[str, UserCode]) -> bool:
    """True if `run` is finished and the resolved `config`, with the user's `codes`, asks for nothing else.

    False if there are steps left: train_iters is larger now, or only an older checkpoint is left.

    Raises:
        TrainerError: the run is finished, and `config` has other hyperparameters.
        OSError: the checkpoints cannot be read.
    """
    newest = last_checkpoint(run, config)
    if newest is None:
        return is_marked(run, config) and checkpoint_files.newest_complete(run.checkpoints) is None
    assert newest.record is not None
    files = provenance.examine(config, newest.record, codes=codes)
    where = f"{run.root} (iteration {newest.iteration})"
    confirmations = Confirmations.of(config.checkpoint.changed, newest.record)
    hyperparameters.check_finished(
        files.saved, config, where=where, contents=files.changes, confirmations=confirmations
    )
    return True


def last_checkpoint(run: RunDirectory, config: TrainerConfig) -> Checkpoint | None:
    """The final checkpoint of the finished `run`; None if there are steps left to train.

    Also None if no checkpoint is left. Then `is_marked` tells whether the run is finished; if it is not,
    `trainer.contract.resuming.evidence` tells whether it may start over.

    Raises:
        OSError: the checkpoints cannot be read.
    """
    if not run.done.exists():
        return None
    newest = checkpoint_files.newest_complete(run.checkpoints)
    last = early_end(run, config) or config.training.train_iters
    return newest if newest is not None and newest.iteration == last else None


def early_end(run: RunDirectory, config: TrainerConfig) -> int | None:
    """The last iteration of a run that exactly this resolved `config` has stopped early; None if it has not.

    Raises:
        OSError: DONE cannot be read.
    """
    lines = _marker(run)
    is_early = len(lines) > 2 and lines[1] == fingerprint(config) and lines[2].startswith(STOPPED_EARLY)
    return int(lines[0]) if is_early and lines[0].isdecimal() else None


def is_marked(run: RunDirectory, config: TrainerConfig) -> bool:
    """True if DONE records that exactly this resolved `config` is finished.

    Raises:
        OSError: DONE cannot be read.
    """
    return _marker(run)[1:2] == [fingerprint(config)]


def _marker(run: RunDirectory) -> list[str]:
    """The lines of DONE; none if there is no such file."""
    try:
        return read_text(run.done, errors="replace").splitlines()
    except (FileNotFoundError, IrregularFileError):
        return []
