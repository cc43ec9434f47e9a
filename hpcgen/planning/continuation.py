"""The trainer's rules for resumed runs, checked before the job is submitted.

hpcgen.planning.resuming imports this module if there is something to resume from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgen.config.run import RunConfig
from hpcgen.config.shown import show
from hpcgen.errors import Problem
from trainer.contract.config import TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import FORMAT, Checkpoint
from trainer.contract.files.finished import is_marked, last_checkpoint
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.resuming import base_model, evidence, provenance
from trainer.contract.resuming.change import Change
from trainer.contract.resuming.confirmations import Confirmations
from trainer.contract.resuming.hyperparameters import (
    FIXED_BY_OPTIMIZER_STATE,
    FREE,
    MORE_TOKENS,
    OF_VOCABULARY,
    compare,
    differences,
    may_add_tokens,
)


@dataclass(frozen=True)
class Continuation:
    """The checkpoint that an attempt starts from."""

    path: Path
    iteration: int
    weights_only: bool
    """True if only the weights are loaded and the run starts at iteration 0."""
    is_finished: bool
    """True if the checkpoint is the last one of a finished run."""
    changes: tuple[Change, ...]
    """Hyperparameters and files that differ, which checkpoint.changed confirms."""


@dataclass(frozen=True)
class Resumption:
    """A training that may resume from a checkpoint. A checkpoint of Megatron-LM, or one that cannot be read here, is
    left to the trainer."""

    trainer: TrainerConfig

    def problems(self, config: RunConfig) -> list[Problem]:
        """Changes that the trainer would refuse, and training that would be lost. `config` is the run file."""
        return [*_changed_hyperparameters(config, self.trainer), *_discarded_training(self.trainer)]

    def warnings(self) -> list[Problem]:
        """Warnings about a run that has already finished, rotary frequencies, and names that are left over.

        The configuration must have passed `problems`.
        """
        return [
            *_nothing_to_do(self.trainer),
            *_unscaled_positions(self.trainer),
            *_leftover_confirmations(self.trainer),
        ]

    def continuation(self) -> Continuation | None:
        """The checkpoint that the trainer would start from; None if there is none or it cannot be read here.

        The configuration must have passed `problems`. Files that only the trainer reads are not compared.
        """
        try:
            source = _source(self.trainer)
        except OSError:
            return None
        if source is None:
            return None
        source, contents = _with_files(source, self.trainer)
        changes = () if source.weights_only else tuple(_changes(source, self.trainer, contents))
        return Continuation(
            source.path, source.record["iteration"], source.weights_only, source.is_finished, changes
        )

    def record(self) -> dict[str, Any] | None:
        """Record of the checkpoint whose position in the data the training continues; None if it begins at sample 0.

        Raises:
            OSError: the directory cannot be read.
        """
        source = _source(self.trainer)
        return None if source is None or source.weights_only else source.record

    def continues_from_unknown(self) -> bool:
        """True if the training continues from a checkpoint whose position in the data only the trainer can read: one of
        Megatron-LM, or one in a newer format.

        Raises:
            OSError: the directory cannot be read.
        """
        key, found = _newest(self.trainer)
        is_only_loaded = key == "checkpoint.load" and self.trainer.checkpoint.finetune
        return found is not None and _source(self.trainer) is None and not is_only_loaded


def _changed_hyperparameters(config: RunConfig, trainer: TrainerConfig) -> list[Problem]:
    """Changes that the trainer would refuse, compared with the checkpoint that it would resume from.

    `config` is the run file and `trainer` the configuration resolved from it. Empty without a checkpoint, and
    for a checkpoint of Megatron-LM or one that cannot be read here, which the trainer checks.
    """
    try:
        source = _source(trainer)
    except OSError:
        return []
    if source is None:
        return []
    source, contents = _with_files(source, trainer)
    if source.record.get("weights_only") and not source.weights_only:
        return [_only_weights(source)]
    if problem := _misfit_of_adapters(source, trainer):
        return [problem]
    return [
        *_early_end(source, trainer),
        *_problems(source, config, trainer, contents),
    ]


def _leftover_confirmations(trainer: TrainerConfig) -> list[Problem]:
    """Warnings about entries of checkpoint.changed that confirm nothing, since earlier attempts have used them."""
    try:
        source = _source(trainer)
    except OSError:
        return []
    spent = [] if source is None else source.confirmations(trainer).spent()
    return [Problem("checkpoint.changed", f"has {entry}", "remove it") for entry in spent]


def _with_files(source: _Source, trainer: TrainerConfig) -> tuple[_Source, list[Change]]:
    """`source` with the current paths of files that only moved, and the files whose content has changed."""
    if not source.weights_only:
        with contextlib.suppress(OSError):
            files = provenance.examine(trainer, source.record, thorough=False)
            return dataclasses.replace(source, record={**source.record, **files.saved}), files.changes
    return source, []


def _changes(source: _Source, trainer: TrainerConfig, contents: Sequence[Change]) -> list[Change]:
    """Hyperparameters and files that differ from the checkpoint's and must be confirmed."""
    _, others = compare(source.record, trainer, weights_only=source.weights_only)
    return [*(change for change in others if change.name not in FREE), *contents]


def _nothing_to_do(trainer: TrainerConfig) -> list[Problem]:
    """A warning if the run is already finished. Its configuration must have passed `Resumption.problems`."""
    run = RunDirectory.of(trainer)
    try:
        is_finished = is_marked(run, trainer) or last_checkpoint(run, trainer) is not None
    except OSError:
        return []
    reason = f"has been reached. The run in {trainer.run_dir} is finished and has nothing left to train"
    optimizer = trainer.optimizer
    hint = (
        f"to continue training, increase it and set optimizer.lr_decay_iters: {optimizer.lr_decay_iters} and "
        f"optimizer.lr_warmup_iters: {optimizer.lr_warmup_iters}, whose defaults follow it"
    )
    return [Problem("training.train_iters", reason, hint)] if is_finished else []


def _unscaled_positions(trainer: TrainerConfig) -> list[Problem]:
    """A warning if the rotary frequencies do not fit sequences longer than those of the loaded weights.

    The checkpoint's max_position_embeddings counts as its length, since a model may train on shorter samples.
    """
    try:
        source = _source(trainer)
    except OSError:
        return []
    if source is None or not source.weights_only or trainer.model.position_embedding_type != "rope":
        return []
    saved, length, scaling = source.record["model"], trainer.model.seq_length, trainer.model.rope_scaling
    trained = saved.get("max_position_embeddings") or saved["seq_length"]
    of_checkpoint = f"{trained}, the sequence length of the checkpoint {source.path}"
    rotary = {"model.rotary_base", "model.rope_scaling"}
    if length > trained and not rotary & {change.name for change in differences(source.record, trainer)}:
        reason = f"is more than {of_checkpoint}, but the rotary frequencies are the same"
        hint = f"set model.rope_scaling, for example rope_type: yarn, factor: {length / trained:g} and "
        return [Problem("model.seq_length", reason, f"{hint}original_max_position_embeddings: {trained}")]
    original = scaling and scaling.original_max_position_embeddings
    if original and saved.get("rope_scaling") is None and original != trained:
        path = "model.rope_scaling.original_max_position_embeddings"
        return [Problem(path, f"differs from {of_checkpoint}", f"set it to {trained}")]
    return []


@dataclass(frozen=True)
class _Source:
    """The checkpoint that the trainer would start from."""

    path: Path
    record: dict[str, Any]
    key: str
    """Key that names the checkpoint's directory."""
    weights_only: bool
    is_finished: bool = False
    """The run ended with this checkpoint, and `trainer` has nothing left to train."""

    def confirmations(self, trainer: TrainerConfig) -> Confirmations:
        """The changes that checkpoint.changed confirms for this checkpoint."""
        return Confirmations.of(trainer.checkpoint.changed, None if self.weights_only else self.record)


def _source(trainer: TrainerConfig) -> _Source | None:
    """The checkpoint that the trainer would load, judged by file names and sizes only.

    Follows trainer/contract/files/finished.py and trainer/checkpoint/finding.py.

    Raises:
        OSError: the directory cannot be read.
    """
    if (last := last_checkpoint(RunDirectory.of(trainer), trainer)) is not None:
        assert last.record is not None
        return _Source(last.path, last.record, "paths.run_dir", weights_only=False, is_finished=True)
    key, found = _newest(trainer)
    if found is None or found.record is None or found.record.get("format", FORMAT) > FORMAT:
        return None
    return _Source(found.path, found.record, key, key == "checkpoint.load" and trainer.checkpoint.finetune)


def _newest(trainer: TrainerConfig) -> tuple[str, Checkpoint | None]:
    """The newest checkpoint that the trainer could load, and the key that names its directory."""
    key, own = _own(trainer)
    found = _newest_valid(own)
    if found is None and trainer.checkpoint.load is not None:
        return "checkpoint.load", _newest_to_load(trainer.checkpoint.load)
    return key, found


def _own(trainer: TrainerConfig) -> tuple[str, Path]:
    """The directory of the run's own checkpoints, and the key that names it."""
    key = "checkpoint.save" if trainer.checkpoint.save else "paths.run_dir"
    return key, RunDirectory.of(trainer).checkpoints


def _discarded_training(trainer: TrainerConfig) -> list[Problem]:
    """The problem if the trainer would refuse to start before an iteration that the run has already saved.

    Empty if this machine does not see the checkpoint directory.
    """
    key, own = _own(trainer)
    keys = trainer.checkpoint
    try:
        if is_marked(RunDirectory.of(trainer), trainer):
            return []
        if not (own.is_dir() if keys.save else Path(trainer.run_dir).is_dir()) or _newest_valid(own):
            return []
        found = _newest_to_load(keys.load) if keys.load and not keys.finetune else None
        refusal = evidence.refusal(
            RunDirectory.of(trainer),
            keys.load,
            begins_at=found.iteration if found else 0,
            discard_up_to=keys.discard_up_to,
        )
    except OSError:
        return []
    if refusal is None:
        return []
    return [Problem(key, f"would lose training: {refusal.reason}", refusal.hint)]


def _newest_valid(directory: Path) -> Checkpoint | None:
    return _first_valid(checkpoint_files.list_paths(directory))


def _newest_to_load(load: str) -> Checkpoint | None:
    return _first_valid(checkpoint_files.paths_to_load(Path(load)))


def _first_valid(paths: list[Path]) -> Checkpoint | None:
    for path in paths:
        checkpoint = checkpoint_files.describe(path)
        if not checkpoint_files.problems(checkpoint, hashes=False):
            return checkpoint
    return None


def _only_weights(source: _Source) -> Problem:
    if source.key != "checkpoint.load":
        hint = "name it in checkpoint.load with checkpoint.finetune: true, and save elsewhere"
        return Problem(source.key, f"contains {source.path}, which has only weights", hint)
    reason = f"does not fit {source.path}, which has only weights"
    return Problem("checkpoint.finetune", reason, "set it to true")


def _misfit_of_adapters(source: _Source, trainer: TrainerConfig) -> Problem | None:
    """Why the run cannot start from the source, because only one of them has adapters or their model has changed."""
    record, only_weights = source.record, source.weights_only
    problem = base_model.mismatch(
        source.path,
        record,
        trainer.lora,
        weights_only=only_weights,
        is_own=source.key != "checkpoint.load",
    )
    if problem is not None:
        return problem
    if base_model.has_adapters(record):
        try:
            base_model.find(record, trainer.checkpoint.load)
        except TrainerError as error:
            return Problem("checkpoint.load", f"does not fit: {error}")
        except OSError:
            return None
    return None


def _early_end(source: _Source, trainer: TrainerConfig) -> Iterator[Problem]:
    iteration = source.record["iteration"]
    if not source.weights_only and iteration > trainer.training.train_iters:
        reason = f"is less than {iteration}, the iteration of the checkpoint {source.path}"
        hint = f"use {iteration} or more, or start a shorter run in another paths.run_dir"
        yield Problem("training.train_iters", reason, hint)


def _problems(
    source: _Source, config: RunConfig, trainer: TrainerConfig, contents: Sequence[Change]
) -> Iterator[Problem]:
    """Yields the changes that check_changes and check_finished of the trainer would refuse.

    If some changes do not fit the weights, yields only these, and files whose content has changed.
    """
    misfits, _ = compare(source.record, trainer, weights_only=source.weights_only)
    changes = [] if source.weights_only else _changes(source, trainer, contents)
    confirmations = source.confirmations(trainer)
    confirmed = frozenset() if source.is_finished else confirmations.names
    refused = [change for change in changes if change.name not in confirmed]
    listed = confirmations.list_for(
        change for change in changes if change.name not in FIXED_BY_OPTIMIZER_STATE
    )
    is_regrouped = any(change.name in FIXED_BY_OPTIMIZER_STATE for change in refused)
    for change in (*misfits, *(each for each in refused if each.is_content or not misfits)):
        back = _back(change)
        if source.is_finished:
            hint = f"the run is finished: {back}, or use another paths.run_dir"
            if not misfits and not is_regrouped:
                hint += f". To continue with it, increase training.train_iters and set checkpoint.changed: {listed}"
        elif change in misfits:
            hint = f"this is a different model: {back}, or use another {source.key}"
            if change.name in OF_VOCABULARY and may_add_tokens(trainer, source.weights_only):
                hint += f". {MORE_TOKENS}"
        elif change.name in FIXED_BY_OPTIMIZER_STATE:
            hint = f"{back}, or load only the weights with checkpoint.load and checkpoint.finetune: true"
        else:
            hint = f"if this is intended, set checkpoint.changed: {listed}; otherwise {back}"
        spent = "".join(f". checkpoint.changed has {entry}" for entry in confirmations.spent([change]))
        yield Problem(change.name, _reason(change, source, config) + spent, hint)


def _reason(change: Change, source: _Source, config: RunConfig) -> str:
    if change.is_content:
        files = f"{change.before} is now {change.after}"
        return f"has changed since the checkpoint {source.path} was saved: {files}"
    written = operator.attrgetter(change.name)(config)
    here = "" if written not in (None, ()) else f"resolves to {show(change.after)}, which "
    return f"{here}differs from {show(change.before)} in the checkpoint {source.path}"


def _back(change: Change) -> str:
    if change.is_content:
        return "restore the file"
    return f"set it to {show(change.before)}" if _is_short(change.before) else "set it back"


def _is_short(value: Any) -> bool:
    """Returns True if the value is short enough to be shown in full."""
    return not show(value).endswith("...")
