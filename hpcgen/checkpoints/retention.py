"""Retention rules of checkpoints, and manual removal and pinning."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgen.checkpoints.finding import checkpoint_section, demote_incomplete, file_error, read_directory
from hpcgen.checkpoints.run_config import read_run_config
from hpcgen.errors import HpcgenError
from trainer.contract.evaluation import evaluated
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import Checkpoint
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.files.shared_files import refuse_foreign_link, require_own


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Retention rules of a run, and their source."""

    keep_last: int | None
    keep_every: int | None
    evaluation_every: int | None = None
    evaluated: frozenset[int] = frozenset()
    """Iterations that have a result of an evaluation."""
    source: Path | None
    """Configuration file with the rules; None if there is none."""

    def kept(self, checkpoints: Sequence[Checkpoint]) -> dict[int, str]:
        """Reasons to keep the checkpoints of a directory, by iteration."""
        best = checkpoint_files.best_iteration(checkpoints[0].path.parent) if checkpoints else None
        return checkpoint_files.kept(
            checkpoints, self.keep_last, self.keep_every, self.evaluation_every, self.evaluated, best
        )

    def __str__(self) -> str:
        if self.keep_last is None:
            return "keeps all: no retention rule"
        newest = "the newest one" if self.keep_last == 1 else f"the newest {self.keep_last}"
        every = f", multiples of {self.keep_every:,}" if self.keep_every else ""
        awaited = (
            f", multiples of {self.evaluation_every:,} until they are evaluated"
            if self.evaluation_every
            else ""
        )
        return f"keeps {newest}{every}{awaited}, and pinned ones"


def read_retention(path: Path) -> Retention:
    """Reads the retention rules from the configuration of the run in `path`, or of the run that saves to `path`.

    Raises:
        HpcgenError: the results of its evaluations cannot be listed.
    """
    run_dir = path
    config, source = read_run_config(run_dir)
    if source is None:
        run_dir = path.absolute().parent
        config, source = read_run_config(run_dir)
        if not _saves_into(config, path):
            return Retention(keep_last=None, keep_every=None, source=None)
    rules = checkpoint_section(config)
    try:
        results = evaluated(run_dir)
    except OSError as error:
        raise file_error(error, run_dir, "read") from error
    return Retention(
        keep_last=rules.get("keep_last"),
        keep_every=rules.get("keep_every"),
        evaluation_every=config.get("evaluation_every"),
        evaluated=frozenset(results),
        source=source,
    )


def _saves_into(config: dict[str, Any], path: Path) -> bool:
    """Returns whether the run of `config` saves to `path`. A configuration next to `path` may belong to a different
    run."""
    run_dir = config.get("run_dir")
    if not isinstance(run_dir, str):
        return False
    return RunDirectory.recorded(Path(run_dir), config).checkpoints.resolve() == path.resolve()


def require_named_by_user(checkpoints: Path, directory: Path) -> None:
    """Refuses to remove checkpoints elsewhere than in `directory`, which the user named, if others chose the place.

    Members of a group that shares a run can write its configuration, and put links into its directory.

    Raises:
        HpcgenError: the place is from the configuration of another user, or behind a link of another user.
    """
    try:
        if checkpoints.is_relative_to(directory):
            refuse_foreign_link(checkpoints, directory)
            return
        source = read_run_config(directory)[1]
        if source is not None:
            require_own(source.stat(), source)
    except OSError as error:
        raise HpcgenError(
            f"{error.filename} {error.strerror}, and it leads to {checkpoints.resolve()}",
            f"if these are the checkpoints, run hpcgen checkpoint prune {checkpoints.resolve()}",
        ) from error


def prunable(directory: Path, retention: Retention) -> list[Checkpoint]:
    """Checkpoints that retention does not keep, oldest first.

    Raises:
        HpcgenError: keep_last is not set.
    """
    if retention.keep_last is None:
        where = f" in {retention.source}" if retention.source else ""
        raise HpcgenError(
            f"checkpoint.keep_last is not set{where}, so all are kept", "add --keep-last N", where=directory
        )
    checkpoints = demote_incomplete(read_directory(directory))
    kept = retention.kept(checkpoints)
    return [checkpoint for checkpoint in reversed(checkpoints) if checkpoint.iteration not in kept]


def remove(path: Path) -> None:
    """Removes a checkpoint. Renames it first, so that an interrupted removal leaves nothing that looks like one.

    Raises:
        HpcgenError: the checkpoint cannot be removed.
    """
    try:
        checkpoint_files.remove(path)
    except FileNotFoundError:
        pass  # the trainer has already removed it
    except OSError as error:
        raise file_error(error, path, "remove") from error


def pin(checkpoint: Checkpoint) -> None:
    """Pins a checkpoint, so that retention never removes it.

    Raises:
        HpcgenError: the checkpoint is not complete, or its directory is not writable.
    """
    if not (checkpoint.is_complete or checkpoint.is_foreign):
        raise HpcgenError(f"{checkpoint.path} is not complete ({checkpoint.flaw})", "pin a complete one")
    try:
        os.close(
            os.open(
                checkpoint.path / checkpoint_files.PINNED, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666
            )
        )
    except OSError as error:
        raise file_error(error, checkpoint.path, "pin") from error


def unpin(checkpoint: Checkpoint) -> None:
    """Unpins a checkpoint, so that retention may remove it.

    Raises:
        HpcgenError: the checkpoint cannot be unpinned.
    """
    try:
        (checkpoint.path / checkpoint_files.PINNED).unlink(missing_ok=True)
    except OSError as error:
        raise file_error(error, checkpoint.path, "unpin") from error
