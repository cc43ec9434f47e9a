"""Which checkpoints stay, and removing and pinning them by hand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgen.checkpoints.finding import cannot, checkpoint_section, read_directory, whole_ones
from hpcgen.errors import HpcgenError
from hpcgen.run_config import read_run_config
from trainer.contract import checkpoint_files
from trainer.contract.checkpoint_files import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints a run keeps, and where that is written."""

    keep_last: int | None
    keep_every: int | None
    source: Path | None
    """The configuration that says so; None when there is none."""

    def __str__(self) -> str:
        if self.keep_last is None:
            return "no rule removes any"
        newest = "the newest one stays" if self.keep_last == 1 else f"the newest {self.keep_last} stay"
        every = f", and multiples of {self.keep_every:,}" if self.keep_every else ""
        return f"{newest}{every}, and pinned ones"


def read_retention(path: Path) -> Retention:
    """What the configuration of the run in `path`, or of the one that saves there, says of retention."""
    config, source = read_run_config(path)
    if source is None:
        config, source = read_run_config(path.absolute().parent)
        if not _saves_into(config, path):
            return Retention(keep_last=None, keep_every=None, source=None)
    rules = checkpoint_section(config)
    return Retention(keep_last=rules.get("keep_last"), keep_every=rules.get("keep_every"), source=source)


def _saves_into(config: dict[str, Any], path: Path) -> bool:
    """Whether a run's checkpoints lie in `path`; beside them may lie anything, other runs' configurations too."""
    saved, run_dir = checkpoint_section(config).get("save"), config.get("run_dir")
    if not isinstance(saved, str):
        saved = str(Path(run_dir) / "checkpoints") if isinstance(run_dir, str) else None
    return saved is not None and Path(saved).resolve() == path.resolve()


def prunable(directory: Path, retention: Retention) -> list[Checkpoint]:
    """The checkpoints that retention does not keep, oldest first.

    Raises:
        HpcgenError: no rule says how many to keep.
    """
    if retention.keep_last is None:
        where = f" in {retention.source}" if retention.source else ""
        raise HpcgenError(
            f"{directory}: checkpoint.keep_last is not set{where}: all are kept", "add --keep-last N"
        )
    checkpoints = whole_ones(read_directory(directory))
    kept = checkpoint_files.kept(checkpoints, retention.keep_last, retention.keep_every)
    return [checkpoint for checkpoint in reversed(checkpoints) if checkpoint.iteration not in kept]


def remove(path: Path) -> None:
    """Removes a checkpoint: it loses its name first, so that a kill leaves nothing that looks like one.

    Raises:
        HpcgenError: it cannot be removed.
    """
    try:
        checkpoint_files.remove(path)
    except FileNotFoundError:
        pass  # the trainer was faster
    except OSError as error:
        raise HpcgenError(f"{error.filename or path}: cannot be removed ({error.strerror})") from error


def pin(checkpoint: Checkpoint) -> None:
    """Marks a checkpoint so that nothing ever removes it by itself.

    Raises:
        HpcgenError: it is not complete, or cannot be written to.
    """
    if not (checkpoint.is_complete or checkpoint.is_foreign):
        raise HpcgenError(f"{checkpoint.path}: is not complete, {checkpoint.flaw}", "pin one that is")
    try:
        os.close(
            os.open(
                checkpoint.path / checkpoint_files.PINNED, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666
            )
        )
    except OSError as error:
        raise cannot(error, checkpoint.path, "pinned") from error


def unpin(checkpoint: Checkpoint) -> None:
    """Takes the mark away.

    Raises:
        HpcgenError: it cannot be.
    """
    try:
        (checkpoint.path / checkpoint_files.PINNED).unlink(missing_ok=True)
    except OSError as error:
        raise cannot(error, checkpoint.path, "unpinned") from error
