"""Finds the newest valid checkpoint, before the model is built.

Broken checkpoints are skipped, with a line in the log for each. A run never discards saved training by itself: if none
of its checkpoints is valid, it does not start (`trainer.contract.resuming.evidence`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer.checkpoint import megatron_lm, reading
from trainer.checkpoint.foreign import read_foreign
from trainer.contract.code.user_code import UserCode
from trainer.contract.config import TrainerConfig
from trainer.contract.errors import Scope, TrainerError
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import METADATA, STARTED, TRACKER, Checkpoint
from trainer.contract.files.run_directory import RunDirectory, publish
from trainer.contract.problem import Problem, listed
from trainer.contract.resuming import base_model, evidence, hyperparameters, provenance
from trainer.contract.resuming.change import Change
from trainer.contract.resuming.confirmations import Confirmations
from trainer.contract.wording import counted
from trainer.faults import lock, storage
from trainer.faults.storage import at_rank_0
from trainer.metrics.console import Log


@dataclass(frozen=True)
class Source:
    """The checkpoint that an attempt starts from."""

    checkpoint: Checkpoint
    weights_only: bool
    """True if only the weights are loaded and the run starts at iteration 0 (checkpoint.finetune)."""
    changes: tuple[Change, ...]
    """Hyperparameters that differ from the checkpoint's, as checkpoint.changed allows."""
    confirmed: dict[str, Any]
    """Names in checkpoint.changed that are used once this attempt saves (`trainer.contract.resuming.confirmations`)."""
    passed_over: tuple[str, ...]
    """Newer checkpoints that are broken, each with its problems and what was done with it."""
    origins: dict[str, Any]
    """Files that this attempt depends on, for the records of its own checkpoints (contract/resuming/provenance.py)."""
    foreign: megatron_lm.Resumed | None = None
    """Values from a checkpoint of Megatron-LM; None for one of this trainer."""
    base: Checkpoint | None = None
    """The checkpoint with the frozen weights of a run with adapters. It is `checkpoint` if the adapters are new."""

    @property
    def path(self) -> Path:
        """Directory of the checkpoint."""
        return self.checkpoint.path

    @property
    def has_adapters(self) -> bool:
        """True if the checkpoint contains adapters and no other weights."""
        return base_model.has_adapters(self.checkpoint.record)

    @property
    def sections(self) -> Mapping[str, Any]:
        """The record of the checkpoint or, for one of Megatron-LM, the sections that are known."""
        if self.foreign is not None:
            return self.foreign.sections
        assert self.checkpoint.record is not None
        return self.checkpoint.record

    @property
    def consumed_tokens(self) -> int:
        """Number of tokens that the run has read."""
        if self.foreign is not None:
            return self.foreign.consumed_samples * int(self.foreign.sections["model"]["seq_length"])
        return checkpoint_files.consumed_tokens(self.sections)


def find(
    own: Path, config: TrainerConfig, codes: Mapping[str, UserCode], log: Log, beat: Callable[[], None]
) -> Source | None:
    """The newest valid checkpoint in `own`, else of checkpoint.load; None to start from random weights.

    Every rank must call this and reads a share of the files; `beat` is called while the reading makes progress.
    `codes` is the user's code, which is compared with the checkpoint's. `own` is the directory that this run writes
    to. It is locked until this process ends, leftovers of interrupted saves are removed from it, and broken checkpoints
    in it are renamed. Nothing in checkpoint.load is changed.

    Raises:
        TrainerError: the run has saved training but no checkpoint is valid; the storage fails; or the newest checkpoint
            has another model or other hyperparameters.
        RunDirectoryBusyError: another process saves in `own`.
    """
    at_rank_0(lambda: _create_and_lock(own), own, "locked")
    at_rank_0(lambda: checkpoint_files.sweep(own), own, "cleaned up")
    own_paths = at_rank_0(lambda: checkpoint_files.list_paths(own), own)
    found, passed_over = _newest_valid(own_paths, log, beat, is_own=True)
    if found is not None:
        if warning := at_rank_0(partial(_correct_tracker, found), own):
            log.line(warning)
        return _source(found, config, codes, passed_over, log, beat, is_own=True)
    if config.checkpoint.load is None:
        _check_evidence(own, config, begins_at=0)
        return None
    load = Path(config.checkpoint.load)
    paths = at_rank_0(lambda: checkpoint_files.paths_to_load(load), load)
    found, passed_over = _newest_valid(paths, log, beat, is_own=False)
    if found is None:
        nested = load / "checkpoints"
        named = f"{nested}, the checkpoints of this run" if nested.is_dir() else "a directory of checkpoints"
        raise TrainerError(
            f"checkpoint.load = {config.checkpoint.load!r} holds no valid checkpoint. Set it to {named}, to one "
            "iter_... directory, or remove the key to start from random weights",
            scope=Scope.ALL_RANKS,
        )
    weights_only = config.checkpoint.finetune
    _check_evidence(own, config, begins_at=0 if weights_only else found.iteration)
    return _source(found, config, codes, passed_over, log, beat, is_own=False)


def _check_evidence(own: Path, config: TrainerConfig, *, begins_at: int) -> None:
    """Raise TrainerError on all ranks if the run would discard saved training."""

    def refusal() -> Problem | None:
        keys = config.checkpoint
        return evidence.refusal(
            RunDirectory.of(config), keys.load, begins_at=begins_at, discard_up_to=keys.discard_up_to
        )

    if reason := at_rank_0(refusal, own):
        raise TrainerError(str(reason), scope=Scope.ALL_RANKS)


def _source(
    found: Checkpoint,
    config: TrainerConfig,
    codes: Mapping[str, UserCode],
    passed_over: tuple[str, ...],
    log: Log,
    beat: Callable[[], None],
    *,
    is_own: bool,
) -> Source:
    """Check that `config` may resume from `found`. This comes before building the model, which can take minutes."""
    weights_only = config.checkpoint.finetune and not is_own
    record = found.record or {}
    _require_readable(found, config, weights_only=weights_only, is_own=is_own)
    files = _examine(found, config, codes, log, beat, weights_only)
    base = _base(found, config, files.origins, beat)
    confirmations = Confirmations.of(
        config.checkpoint.changed,
        None if weights_only else found.record or {"iteration": found.iteration},
    )

    def compare() -> tuple[megatron_lm.Resumed | None, tuple[Change, ...]]:
        try:
            foreign = (
                read_foreign(found.path, config.parallelism, weights_only=weights_only)
                if found.is_foreign
                else None
            )
            if not weights_only:
                hyperparameters.check_iteration(found.iteration, config)
            saved = hyperparameters.completed(foreign.sections, config) if foreign else files.saved or record
            return foreign, hyperparameters.check_changes(
                saved,
                config,
                weights_only=weights_only,
                contents=files.changes,
                confirmations=confirmations,
            )
        except TrainerError as error:
            raise TrainerError(str(error), where=found.path) from error

    foreign, changes = at_rank_0(compare, found.path)
    for entry in confirmations.spent():
        log.line(f"checkpoint.changed has {entry}. Remove it")
    confirmed = confirmations.after(changes)
    return Source(found, weights_only, changes, confirmed, passed_over, files.origins, foreign, base)


def _require_readable(found: Checkpoint, config: TrainerConfig, *, weights_only: bool, is_own: bool) -> None:
    """Raise TrainerError on all ranks if `config` cannot use what the checkpoint contains."""
    record = found.record or {}
    if problem := checkpoint_files.format_problem(found.path, record):
        raise TrainerError(problem, scope=Scope.ALL_RANKS)
    if record.get("weights_only") and not weights_only:
        writer = "average" if record.get("averaged") else "import"
        raise TrainerError(
            f"{found.path} has only weights (hpcgen checkpoint {writer} wrote it). Name it in checkpoint.load, set "
            "checkpoint.finetune: true, and save elsewhere",
            scope=Scope.ALL_RANKS,
        )
    misfit = base_model.mismatch(
        found.path, found.record, config.lora, weights_only=weights_only, is_own=is_own
    )
    if misfit is not None:
        raise TrainerError(str(misfit), scope=Scope.ALL_RANKS)


def _base(
    found: Checkpoint, config: TrainerConfig, origins: dict[str, Any], beat: Callable[[], None]
) -> Checkpoint | None:
    """The checkpoint with the frozen weights, which is added to `origins`. None for a run without adapters."""
    if config.lora.rank is None:
        return None
    base = found
    if base_model.has_adapters(found.record):
        base = at_rank_0(lambda: base_model.find(found.record or {}, config.checkpoint.load), found.path)
        if broken := reading.problems(base, beat):
            raise TrainerError(base_model.damage(base, found.path, broken), scope=Scope.ALL_RANKS)
    origins[base_model.ORIGIN] = at_rank_0(lambda: base_model.entry(base), base.path)
    return base


def _examine(
    found: Checkpoint,
    config: TrainerConfig,
    codes: Mapping[str, UserCode],
    log: Log,
    beat: Callable[[], None],
    weights_only: bool,
) -> provenance.Examination:
    """Compare the files of `config` with those that `found` was trained with. All ranks share the reading.

    There is no comparison if only weights are loaded, or for a checkpoint of Megatron-LM, which does not record files.
    """
    record = None if weights_only or found.is_foreign else found.record
    files = at_rank_0(lambda: provenance.examine(config, record, codes=codes), found.path)
    if files.to_hash:
        size = sum(file["bytes"] for file in files.to_hash.values())
        log.line(
            f"data: reading {counted(len(files.to_hash), 'pair')} ({size / 1e9:,.2f} GB) to compare SHA-256 hashes, "
            f"since modification times differ from those that {found.path} was trained with"
        )
        differing = reading.file_problems(Path("/"), files.to_hash, beat)
        files.add_changed_pairs(list(differing), provenance.pairs_key(config))
    return files


def _create_and_lock(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    busy = f"another process saves its checkpoints in {directory}. Wait for it to end, or use another checkpoint.save"
    lock.hold(directory / lock.SAVING, busy)


def _newest_valid(
    paths: list[Path], log: Log, beat: Callable[[], None], *, is_own: bool
) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The first valid checkpoint of `paths`, which are newest first, and the problems of each newer one."""
    passed_over: list[str] = []
    for path in paths:
        beat()
        # One at a time: every rank needs only one record, and all of them together would be megabytes.
        checkpoint = at_rank_0(partial(checkpoint_files.describe, path), path)
        problems = reading.problems(checkpoint, beat)
        if not problems:
            return checkpoint, tuple(passed_over)
        done = at_rank_0(partial(_move_away, checkpoint), path, "renamed") if is_own else "It was skipped"
        passed_over.append(f"{checkpoint.path}: {listed(problems)}. {done}")
        log.line(f"BROKEN CHECKPOINT {passed_over[-1]}")
    return None, tuple(passed_over)


def _move_away(checkpoint: Checkpoint) -> str:
    """Remove or rename a broken checkpoint. Returns a sentence that says what was done."""
    path = checkpoint.path
    was_begun_here = (path / STARTED).exists() or not any(path.iterdir())
    if checkpoint.is_cut_off and was_begun_here and not (path / METADATA).exists():
        checkpoint_files.remove(path)
        return "Its save was interrupted, so it was removed"
    return f"It was renamed to {checkpoint_files.set_aside(path).name}"


def _correct_tracker(checkpoint: Checkpoint) -> str | None:
    """Make the tracker name the checkpoint that the run resumes from. Returns a warning if that fails.

    A failure is not an error, since only Megatron-LM reads the tracker.
    """
    directory = checkpoint.path.parent
    try:
        if checkpoint_files.tracked_iteration(directory) != checkpoint.iteration:
            publish(directory / TRACKER, str(checkpoint.iteration))
    except OSError as error:
        return f"{TRACKER} was not updated to {checkpoint.path.name}: {storage.reason(error, directory / TRACKER)}"
    return None
