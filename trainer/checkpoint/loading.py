"""Finds the newest checkpoint that is whole, and fills the state of all ranks from it.

Broken ones are passed over, one line each, back to the newest that is as it was written. A directory that
ever held a checkpoint never leads to random weights: when none is left, the run does not start.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.api import CheckpointException

from trainer import checkpoint_files, hyperparameters, megatron_lm
from trainer.checkpoint import state as contents
from trainer.checkpoint_files import COMMON, FORMAT, METADATA, STARTED, TRACKER, Checkpoint
from trainer.config import TrainerConfig
from trainer.distributed import from_rank_0
from trainer.errors import TrainerError
from trainer.hyperparameters import Change
from trainer.logging import Log
from trainer.run_directory import publish
from trainer.step import TrainingState


@dataclass(frozen=True)
class Source:
    """What a life of the run starts from."""

    checkpoint: Checkpoint
    weights_only: bool
    """Whether nothing but the weights is taken, at iteration 0: checkpoint.finetune."""
    changes: tuple[Change, ...]
    """The hyperparameters that differ from the checkpoint's, all of them allowed to."""
    foreign: megatron_lm.Resumed | None = None
    """What Megatron-LM's checkpoint says; None when it is this trainer's."""

    @property
    def path(self) -> Path:
        """Directory of the checkpoint."""
        return self.checkpoint.path


SHOWN = 5
"""Problems of a broken checkpoint that its line in the log names."""


def find(own: Path, config: TrainerConfig, log: Log) -> Source | None:
    """The newest whole checkpoint in `own`, else in checkpoint.load; None to start from random weights.

    Every rank calls this, and reads a part of the files. In `own`, which this run writes, what a save left
    behind is removed and broken checkpoints are renamed; in checkpoint.load nothing is touched.

    Raises:
        TrainerError: there were checkpoints, and none is whole; a file cannot be read; or the newest is of
            another model or of other hyperparameters.
    """
    from_rank_0(lambda: checkpoint_files.sweep(own))
    if (found := _newest_whole(own, log, is_own=True)) is not None:
        from_rank_0(lambda: _correct_tracker(found))
        return _source(found, config, weights_only=False)
    if from_rank_0(lambda: checkpoint_files.ever_held_one(own)):
        raise TrainerError(
            f"{own} held checkpoints, and none that is whole is left; put one back, or move the directory away to "
            "start from the beginning"
        )
    if config.checkpoint.load is None:
        return None
    if (found := _newest_whole(Path(config.checkpoint.load), log, is_own=False)) is None:
        raise TrainerError(
            f"checkpoint.load = {config.checkpoint.load!r} holds no checkpoint that is whole: name a directory of "
            "checkpoints, or leave it out to start from random weights"
        )
    return _source(found, config, weights_only=config.checkpoint.finetune)


def _source(found: Checkpoint, config: TrainerConfig, *, weights_only: bool) -> Source:
    """`found`, if `config` may go on from it; known before the model is built, which takes minutes when large."""
    record = found.record or {}
    if record.get("format", FORMAT) > FORMAT:
        raise TrainerError(
            f"{found.path} was written by a later trainer (format {record['format']}): use that one"
        )
    try:
        foreign = _read_foreign(found.path, config, weights_only) if found.is_foreign else None
        saved = foreign.sections if foreign else record
        changes = hyperparameters.check_changes(saved, config, weights_only=weights_only)
    except TrainerError as error:
        raise TrainerError(f"{found.path}: {error}") from error
    return Source(found, weights_only, changes, foreign)


def _read_foreign(path: Path, config: TrainerConfig, weights_only: bool) -> megatron_lm.Resumed:
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
    except (Exception, CheckpointException) as error:
        if (path / COMMON).exists():
            raise TrainerError(f"{COMMON} cannot be read ({type(error).__name__}: {error})") from error
        raise TrainerError(
            f"megatron-core {megatron.core.__version__} cannot read it, for it has no {COMMON}: use the megatron-core "
            "that wrote it, which is 0.19 or later"
        ) from error
    return megatron_lm.resumed(common, config.parallelism, weights_only=weights_only)


def _newest_whole(directory: Path, log: Log, *, is_own: bool) -> Checkpoint | None:
    for checkpoint in from_rank_0(lambda: _list(directory)):
        problems = _problems(checkpoint)
        if not problems:
            return checkpoint
        done = from_rank_0(partial(_move_away, checkpoint)) if is_own else "It is passed over"
        shown = "; ".join(problems[:SHOWN]) + (
            f"; and {len(problems) - SHOWN} more" if problems[SHOWN:] else ""
        )
        log.line(f"BROKEN CHECKPOINT {checkpoint.path}: {shown}. {done}")
    return None


def _list(directory: Path) -> list[Checkpoint]:
    try:
        return checkpoint_files.list_checkpoints(directory)
    except OSError as error:
        raise _unreadable(f"{error.filename} cannot be read ({error.strerror})") from error


def _unreadable(message: str) -> TrainerError:
    """A fault of the storage, which says nothing about a checkpoint, and may pass."""
    error = TrainerError(message)
    error.is_final = False
    return error


def _problems(checkpoint: Checkpoint) -> list[str]:
    """What is wrong with a checkpoint, on every rank; each has read its share of the files."""
    if checkpoint.record is None:
        return checkpoint_files.problems(checkpoint, hashes=True)
    files = checkpoint.record["files"]
    by_size = sorted(files, key=lambda name: (-files[name]["bytes"], name))
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    share = {name: files[name] for name in by_size[rank::world_size]}
    try:
        found, error = checkpoint_files.file_problems(checkpoint.path, share, hashes=True), None
    except OSError as refused:
        found, error = [], f"{refused.filename or checkpoint.path} cannot be read ({refused.strerror})"
    verdicts: list[tuple[list[str], str | None]] = [([], None)] * world_size
    torch.distributed.all_gather_object(verdicts, (found, error))
    errors = [error for _, error in verdicts if error is not None]
    if errors:
        raise _unreadable(errors[0])
    return [problem for problems, _ in verdicts for problem in problems]


def _move_away(checkpoint: Checkpoint) -> str:
    """Gets a broken checkpoint out of the way; says what was done with it."""
    path = checkpoint.path
    was_begun_here = (path / STARTED).exists() or not any(path.iterdir())
    if checkpoint.is_cut_off and was_begun_here and not (path / METADATA).exists():
        checkpoint_files.remove(path)
        return "Its save was cut off; it was removed"
    return f"It was renamed to {checkpoint_files.set_aside(path).name}"


def _correct_tracker(checkpoint: Checkpoint) -> None:
    directory = checkpoint.path.parent
    if checkpoint_files.tracked_iteration(directory) != checkpoint.iteration:
        publish(directory / TRACKER, str(checkpoint.iteration))


def load(source: Source, state: TrainingState, groups: ProcessGroupCollection) -> None:
    """Fills the state of all ranks from a checkpoint, whatever layout saved it.

    The learning rates, betas and weight decay of the configuration win over those of the checkpoint.

    Raises:
        TrainerError: it cannot be loaded. That is no reason to take an older one: it is as it was written.
    """
    sharding = contents.sharding(groups)
    if source.foreign is not None:
        sharding |= source.foreign.content_metadata
    weights = contents.sharded_weights(state, sharding)
    optimizer = (
        {} if source.weights_only else contents.sharded_optimizer(state, weights, sharding, is_loading=True)
    )
    try:
        loaded, absent = _read(source.path, weights | optimizer, groups)
        if source.foreign is not None:
            loaded |= _position(source.foreign, state)
        if not absent:
            contents.fill(state, loaded, weights_only=source.weights_only)
    # Pickle, zip, key and shape errors, and torch's own, which is no Exception.
    except (Exception, CheckpointException) as error:
        raise TrainerError(
            f"{source.path} is as it was written, and cannot be loaded ({type(error).__name__}: {error}); use the "
            f"versions that wrote it ({_versions(source)}), or rename it to go on from the one before it"
        ) from error
    if absent:
        raise TrainerError(
            f"{source.path} is of another model: it has no {', '.join(sorted(absent)[:SHOWN])}"
        )


def _position(foreign: megatron_lm.Resumed, state: TrainingState) -> dict[str, Any]:
    """What Megatron-LM keeps elsewhere, or not at all, where `fill` looks for it."""
    return {
        "iteration": foreign.iteration,
        "consumed_samples": foreign.consumed_samples,
        "spikes": state.spikes.state_dict(),
    }


def _read(
    path: Path, content: dict[str, Any], groups: ProcessGroupCollection
) -> tuple[dict[str, Any], set[str]]:
    """What the checkpoint holds of `content`, and the names of the tensors on any rank that it does not hold.

    Of what several data-parallel ranks need, one reads it from the storage.
    """
    strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), groups.dp_cp)
    loaded, _, absent_here = dist_checkpointing.load(
        content, str(path), strategy, strict=StrictHandling.RETURN_UNEXPECTED
    )
    absent: list[set[str]] = [set()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(absent, absent_here)
    # Transformer Engine's extra state is that of FP8: a checkpoint of other kernels has none.
    return loaded, {name for names in absent for name in names if contents.EXTRA_STATE not in name}


def _versions(source: Source) -> str:
    versions = (source.checkpoint.record or {}).get("versions", {})
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "Megatron-LM's"
