"""Finds the newest checkpoint that is whole, and fills the state of all ranks from it.

Broken ones are passed over, one line each, back to the newest that is as it was written. A run that has saved training
never begins before it: when no checkpoint of it is left, the run does not start (`trainer.contract.evidence`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

from trainer.checkpoint import megatron_lm, reading, unpickling
from trainer.checkpoint import state as contents
from trainer.contract import checkpoint_files, evidence, hyperparameters, provenance
from trainer.contract.checkpoint_files import COMMON, FORMAT, METADATA, STARTED, TRACKER, Checkpoint
from trainer.contract.config import TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.contract.hyperparameters import Change
from trainer.contract.run_directory import publish
from trainer.distributed.groups import GLOO_ERRORS
from trainer.faults import lock, storage
from trainer.faults.storage import at_rank_0
from trainer.metrics.console import Log
from trainer.step import TrainingState


@dataclass(frozen=True)
class Source:
    """What a life of the run starts from."""

    checkpoint: Checkpoint
    weights_only: bool
    """Whether nothing but the weights is taken, at iteration 0: checkpoint.finetune."""
    changes: tuple[Change, ...]
    """The hyperparameters that differ from the checkpoint's, all of them allowed to."""
    passed_over: tuple[str, ...]
    """The newer ones that are not whole, each with what is wrong and what was done with it."""
    origins: dict[str, Any]
    """The files that this attempt is made of, as its own checkpoints record them (`trainer.contract.provenance`)."""
    foreign: megatron_lm.Resumed | None = None
    """What Megatron-LM's checkpoint says; None when it is this trainer's."""

    @property
    def path(self) -> Path:
        """Directory of the checkpoint."""
        return self.checkpoint.path


SHOWN = 5
"""Problems of a broken checkpoint that its line in the log names."""


def find(own: Path, config: TrainerConfig, log: Log, beat: Callable[[], None]) -> Source | None:
    """The newest whole checkpoint in `own`, else in checkpoint.load; None to start from random weights.

    Every rank calls this, and reads a part of the files; `beat` is called as long as that gets on. `own`, which this
    run writes, is locked for the life of this process; what a save left behind there is removed, and broken
    checkpoints are renamed. In checkpoint.load nothing is touched.

    Raises:
        TrainerError: the run has saved training, and no checkpoint of it is whole; the storage refuses what is needed;
            or the newest is of another model or of other hyperparameters.
        RunDirectoryBusyError: another process saves in `own`.
    """
    at_rank_0(lambda: _take_possession(own), own, "locked")
    at_rank_0(lambda: checkpoint_files.sweep(own), own, "swept")
    found, passed_over = _newest_whole(own, log, beat, is_own=True)
    if found is not None:
        if refused := at_rank_0(lambda: _correct_tracker(found), own):
            log.line(refused)
        return _source(found, config, passed_over, log, beat, weights_only=False)
    if config.checkpoint.load is None:
        _check_evidence(own, config, begins_at=0)
        return None
    found, passed_over = _newest_whole(Path(config.checkpoint.load), log, beat, is_own=False)
    if found is None:
        raise _everywhere(
            f"checkpoint.load = {config.checkpoint.load!r} holds no checkpoint that is whole: name a directory of "
            "checkpoints, or leave it out to start from random weights"
        )
    weights_only = config.checkpoint.finetune
    _check_evidence(own, config, begins_at=0 if weights_only else found.iteration)
    return _source(found, config, passed_over, log, beat, weights_only=weights_only)


def _check_evidence(own: Path, config: TrainerConfig, *, begins_at: int) -> None:
    """Raises TrainerError on all ranks when the run would begin before training that it has saved."""

    def refusal() -> evidence.Refusal | None:
        keys = config.checkpoint
        return evidence.refusal(
            Path(config.run_dir), own, keys.load, begins_at=begins_at, discard_up_to=keys.discard_up_to
        )

    if reason := at_rank_0(refusal, own):
        raise _everywhere(str(reason))


def _source(
    found: Checkpoint,
    config: TrainerConfig,
    passed_over: tuple[str, ...],
    log: Log,
    beat: Callable[[], None],
    *,
    weights_only: bool,
) -> Source:
    """`found`, if `config` may go on from it; known before the model is built, which takes minutes when large."""
    record = found.record or {}
    if record.get("format", FORMAT) > FORMAT:
        raise _everywhere(
            f"{found.path} was written by a later trainer (format {record['format']}): use that one"
        )
    files = _examine(found, config, log, beat, weights_only)

    def compare() -> tuple[megatron_lm.Resumed | None, tuple[Change, ...]]:
        try:
            foreign = _read_foreign(found.path, config, weights_only) if found.is_foreign else None
            if not weights_only:
                hyperparameters.check_iteration(found.iteration, config)
            saved = foreign.sections if foreign else files.saved or record
            return foreign, hyperparameters.check_changes(
                saved, config, weights_only=weights_only, contents=files.changes
            )
        except TrainerError as error:
            raise TrainerError(f"{found.path}: {error}") from error

    foreign, changes = at_rank_0(compare, found.path)
    return Source(found, weights_only, changes, passed_over, files.origins, foreign)


def _examine(
    found: Checkpoint, config: TrainerConfig, log: Log, beat: Callable[[], None], weights_only: bool
) -> provenance.Examination:
    """Compares the files of `config` with those that `found` was trained with; all ranks read what must be read.

    Only weights may come from a run of any data and code, and Megatron-LM's checkpoints say nothing about theirs.
    """
    record = None if weights_only or found.is_foreign else found.record
    files = at_rank_0(lambda: provenance.examine(config, record), found.path)
    if files.to_hash:
        size = sum(file["bytes"] for file in files.to_hash.values())
        log.line(
            f"data: reading {len(files.to_hash)} pairs ({size / 1e9:,.2f} GB): their times differ from those that "
            f"{found.path} was trained with; their SHA-256 tells whether they are the same"
        )
        problems = reading.file_problems(Path("/"), files.to_hash, beat)
        differing = [path for path in files.to_hash if any(each.startswith(f"{path} ") for each in problems)]
        files.refute(differing, provenance.pairs_key(config))
    return files


def _read_foreign(path: Path, config: TrainerConfig, weights_only: bool) -> megatron_lm.Resumed:
    """What Megatron-LM's checkpoint says beside its tensors.

    Raises:
        TrainerError: it cannot be read by these versions, or gone on from.
        OSError: the storage refuses it.
    """
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
    except (Exception, CheckpointException) as error:
        _refuse_code(error, path)
        if not (path / COMMON).exists():
            raise TrainerError(
                f"megatron-core {megatron.core.__version__} cannot read it, for it has no {COMMON}: use the "
                "megatron-core that wrote it, which is 0.19 or later"
            ) from error
        let_pass(error, path)
        raise TrainerError(f"{COMMON} cannot be read ({type(error).__name__}: {error})") from error
    return megatron_lm.resumed(common, config.parallelism, weights_only=weights_only)


def _everywhere(message: str) -> TrainerError:
    """For what all ranks raise at the same place."""
    error = TrainerError(message)
    error.is_everywhere = True
    return error


def _take_possession(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    busy = (
        f"another process saves its checkpoints in {directory}; wait for it, or name another checkpoint.save"
    )
    lock.hold(directory / lock.SAVING, busy)


def _newest_whole(
    directory: Path, log: Log, beat: Callable[[], None], *, is_own: bool
) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """And what is wrong with each newer one."""
    passed_over: list[str] = []
    for path in at_rank_0(lambda: checkpoint_files.list_paths(directory), directory):
        beat()
        # One after the other: the records of all of them would be megabytes, of which every rank needs one.
        checkpoint = at_rank_0(partial(checkpoint_files.describe, path), path)
        problems = reading.problems(checkpoint, beat)
        if not problems:
            return checkpoint, tuple(passed_over)
        done = (
            at_rank_0(partial(_move_away, checkpoint), path, "moved away") if is_own else "It is passed over"
        )
        shown = "; ".join(problems[:SHOWN]) + (
            f"; and {len(problems) - SHOWN} more" if problems[SHOWN:] else ""
        )
        passed_over.append(f"{checkpoint.path}: {shown}. {done}")
        log.line(f"BROKEN CHECKPOINT {passed_over[-1]}")
    return None, tuple(passed_over)


def _move_away(checkpoint: Checkpoint) -> str:
    """Gets a broken checkpoint out of the way; says what was done with it."""
    path = checkpoint.path
    was_begun_here = (path / STARTED).exists() or not any(path.iterdir())
    if checkpoint.is_cut_off and was_begun_here and not (path / METADATA).exists():
        checkpoint_files.remove(path)
        return "Its save was cut off; it was removed"
    return f"It was renamed to {checkpoint_files.set_aside(path).name}"


def _correct_tracker(checkpoint: Checkpoint) -> str | None:
    """Has the tracker name what is gone on from; only Megatron-LM reads it, so what refuses that is returned."""
    directory = checkpoint.path.parent
    try:
        if checkpoint_files.tracked_iteration(directory) != checkpoint.iteration:
            publish(directory / TRACKER, str(checkpoint.iteration))
    except OSError as error:
        return f"{TRACKER} does not name {checkpoint.path.name}: {storage.reason(error, directory / TRACKER)}"
    return None


def load(source: Source, state: TrainingState, groups: ProcessGroupCollection) -> None:
    """Fills the state of all ranks from a checkpoint, whatever layout saved it.

    The learning rates, betas and weight decay of the configuration win over those of the checkpoint.

    Raises:
        NonFiniteError: on all ranks, when it holds numbers that are not finite.
        TrainerError: it cannot be loaded. That is no reason to take an older one: it is as it was written. Or the
            storage refuses a file of it, which may pass.
        RuntimeError: as gloo, NCCL, the store and CUDA raise it: another rank is gone, or the memory is full.
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
    # Pickle, zip, key and shape errors, and torch's own, which is no Exception and raised on all ranks.
    except (Exception, CheckpointException) as error:
        let_pass(error, source.path)
        raised = TrainerError(
            f"{source.path} is as it was written, and cannot be loaded ({type(error).__name__}: {error}); use the "
            f"versions that wrote it ({_versions(source)}), or rename it to go on from the one before it"
        )
        raised.is_everywhere = isinstance(error, CheckpointException)
        raise raised from error
    if not absent:
        contents.check_loaded(state, source.path)
    else:
        raise _everywhere(f"{source.path} is of another model: it has no {', '.join(sorted(absent)[:SHOWN])}")


def let_pass(error: BaseException, path: Path) -> None:
    """Raises what is behind an error of loading, when that says nothing about the checkpoint `path`.

    Raises:
        TrainerError: the storage refused a file, which may pass; or a file names code, which is not run.
        RuntimeError: another rank is gone, or the memory is full; as it was raised.
    """
    _refuse_code(error, path)
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, MemoryError | torch.OutOfMemoryError) or _is_of_the_machine(cause):
            raise cause
    for cause in causes:
        if isinstance(cause, OSError):
            raised = storage.refused(cause, path)
            raised.is_everywhere = isinstance(error, CheckpointException)
            raise raised from error


def _refuse_code(error: BaseException, path: Path) -> None:
    """Raises an error of loading the checkpoint `path` again as a TrainerError, if a file of it names code."""
    for cause in _causes(error):
        if reason := unpickling.forbidden(cause):
            raised = TrainerError(
                f"{path}: {reason}. Nothing of it was run. Do not load this checkpoint; find out who wrote its files"
            )
            raised.is_everywhere = isinstance(error, CheckpointException)
            raise raised from error


def _is_of_the_machine(error: BaseException) -> bool:
    """Whether the ranks' connections or a GPU failed."""
    names = (*GLOO_ERRORS, "CUDA error", "CUDA driver error", "NCCL error")
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in names)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from, and what torch found on each rank."""
    yield error
    if isinstance(error, CheckpointException):
        for failure, _ in error.failures.values():
            yield from _causes(failure)
    if error.__cause__ is not None:
        yield from _causes(error.__cause__)


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
