"""What a run goes on from, as far as this machine sees it: the trainer's own rules, before the job queues."""

from __future__ import annotations

import contextlib
import dataclasses
import os.path
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgen.config.run import RunConfig
from hpcgen.config.validation import show
from hpcgen.errors import Problem
from trainer.contract import checkpoint_files, evidence, provenance
from trainer.contract.checkpoint_files import COMPLETE, FORMAT, TRACKER, Checkpoint
from trainer.contract.config import TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.contract.finished import is_marked, last_checkpoint
from trainer.contract.hyperparameters import FREE, OF_OPTIMIZER_STATE, Change, check_changes, sections
from trainer.contract.run_directory import RunDirectory


def proof_of_checkpoints(load: str) -> str:
    """The file that shows that the directory `load` holds checkpoints: the tracker, or, as in an archive that has none,
    the record of the newest checkpoint."""
    tracker = Path(load, TRACKER)
    with contextlib.suppress(OSError):
        if not tracker.exists():
            for path in checkpoint_files.list_paths(Path(load)):
                if (path / COMPLETE).exists():
                    return str(path / COMPLETE)
    return str(tracker)


def no_checkpoints(load: str, exists: Callable[[str], bool]) -> Problem:
    """What to say of a directory `load` that holds none; one beside it may be meant."""
    if exists(f"{load}/checkpoints"):
        hint = f"did you mean {load}/checkpoints?"
    elif exists(f"{load}/{COMPLETE}"):
        hint = f"did you mean {os.path.dirname(load)}?"  # noqa: PTH120
    else:
        hint = "name the directory that holds iter_... directories"
    why = f"has neither {TRACKER} nor iter_.../{COMPLETE}" if exists(load) else "is not there"
    return Problem("checkpoint.load", f"holds no checkpoint for stage train: {load} {why}", hint)


def changed_hyperparameters(config: RunConfig, trainer: TrainerConfig) -> list[Problem]:
    """What the trainer would refuse of the checkpoint that it finds first: what differs and may not, or is not named.

    `config` is the run file, `trainer` what comes of it. Without a checkpoint, with one that cannot be read here, and
    with Megatron-LM's, nothing is said: the trainer will.
    """
    try:
        source = _source(trainer)
    except OSError:
        return []
    if source is None:
        return []
    contents: list[Change] = []
    if not source.weights_only:
        with contextlib.suppress(OSError):
            files = provenance.examine(trainer, source.record, thorough=False)
            source, contents = (
                dataclasses.replace(source, record={**source.record, **files.saved}),
                files.changes,
            )
    return [
        *_early_end(source, trainer),
        *_problems(source, config, trainer),
        *_content_problems(source, trainer, contents),
    ]


def nothing_to_do(trainer: TrainerConfig) -> list[Problem]:
    """A warning where the run is finished already; its configuration has passed `changed_hyperparameters`."""
    run = RunDirectory.of(trainer)
    try:
        is_finished = is_marked(run, trainer) or last_checkpoint(run, trainer) is not None
    except OSError:
        return []
    reason = f"is reached: the run in {trainer.run_dir} is finished, and there is nothing to train"
    return [Problem("training.train_iters", reason, "set more to train on")] if is_finished else []


@dataclass(frozen=True)
class _Source:
    """The checkpoint that the trainer would start from."""

    path: Path
    record: dict[str, Any]
    key: str
    """Where its directory is named."""
    weights_only: bool
    is_finished: bool = False
    """Whether the run ended with it and `trainer` leaves nothing to train."""


def _source(trainer: TrainerConfig) -> _Source | None:
    """As the trainer finds it (trainer/contract/finished.py, trainer/checkpoint/loading.py), by names and sizes alone.

    Raises:
        OSError: the directory cannot be read.
    """
    if (last := last_checkpoint(RunDirectory.of(trainer), trainer)) is not None:
        assert last.record is not None
        return _Source(last.path, last.record, "paths.run_dir", weights_only=False, is_finished=True)
    load = trainer.checkpoint.load
    key, own = _own(trainer)
    directory, found = own, _newest_whole(own)
    if found is None and load is not None:
        key, directory = "checkpoint.load", Path(load)
        found = _newest_whole(directory)
    if found is None or found.record is None or found.record.get("format", FORMAT) > FORMAT:
        return None
    is_loaded = directory is not own
    return _Source(found.path, found.record, key, is_loaded and trainer.checkpoint.finetune)


def _own(trainer: TrainerConfig) -> tuple[str, Path]:
    """The key that names the directory of the run's own checkpoints, and the directory."""
    save = trainer.checkpoint.save
    return (
        ("checkpoint.save", Path(save)) if save else ("paths.run_dir", Path(trainer.run_dir, "checkpoints"))
    )


def discarded_training(trainer: TrainerConfig) -> list[Problem]:
    """The trainer's refusal to begin before training that the run has saved, if it would refuse.

    Nothing is said where this machine does not see the directory of the checkpoints.
    """
    key, own = _own(trainer)
    keys = trainer.checkpoint
    try:
        if is_marked(RunDirectory.of(trainer), trainer):
            return []
        if not (own.is_dir() if keys.save else Path(trainer.run_dir).is_dir()) or _newest_whole(own):
            return []
        found = _newest_whole(Path(keys.load)) if keys.load and not keys.finetune else None
        refusal = evidence.refusal(
            Path(trainer.run_dir),
            own,
            keys.load,
            begins_at=found.iteration if found else 0,
            discard_up_to=keys.discard_up_to,
        )
    except OSError:
        return []
    return [Problem(key, f"loses training: {refusal.reason}", refusal.hint)] if refusal else []


def _newest_whole(directory: Path) -> Checkpoint | None:
    for path in checkpoint_files.list_paths(directory):
        checkpoint = checkpoint_files.describe(path)
        if not checkpoint_files.problems(checkpoint, hashes=False):
            return checkpoint
    return None


def _early_end(source: _Source, trainer: TrainerConfig) -> Iterator[Problem]:
    iteration = source.record["iteration"]
    if not source.weights_only and iteration > trainer.training.train_iters:
        reason = f"ends before iteration {iteration}, which the checkpoint {source.path} is of"
        hint = f"use {iteration} or more; for a shorter run, name another paths.run_dir"
        yield Problem("training.train_iters", reason, hint)


def _problems(source: _Source, config: RunConfig, trainer: TrainerConfig) -> Iterator[Problem]:
    refused = [
        change for change in _differing(source.record, trainer) if _is_refused(change, trainer, source)
    ]
    misfits = [change for change in refused if _is_refused(change, trainer, source, weights_only=True)]
    named = (change.name for change in refused if change.name not in OF_OPTIMIZER_STATE)
    names = ", ".join(dict.fromkeys((*trainer.checkpoint.changed, *named)))
    for change in misfits or refused:
        written = getattr(getattr(config, change.section), change.key)
        here = "" if written not in (None, ()) else f"comes to {show(change.after)}, which "
        back = f"set it to {show(change.before)}" if _is_short(change.before) else "set it back"
        if source.is_finished:
            hint = f"the run is finished: {back}, or name another paths.run_dir"
            if not misfits and not any(each.name in OF_OPTIMIZER_STATE for each in refused):
                hint += f"; to train on with it, set a larger training.train_iters and checkpoint.changed: [{names}]"
        elif misfits:
            hint = f"it is another model: {back}, or name another {source.key}"
        elif change.name in OF_OPTIMIZER_STATE:
            hint = f"{back}, or take only the weights, with checkpoint.load and checkpoint.finetune: true"
        else:
            hint = f"if that is meant, write checkpoint.changed: [{names}]; else {back}"
        reason = f"{here}differs from {show(change.before)} of the checkpoint {source.path}"
        yield Problem(change.name, reason, hint)


def _content_problems(
    source: _Source, trainer: TrainerConfig, contents: Sequence[Change]
) -> Iterator[Problem]:
    """Files of the same name with other content than the checkpoint was trained with."""
    for change in contents:
        if source.is_finished:
            hint = "the run is finished: put the file back as it was, or name another paths.run_dir"
        elif change.name in trainer.checkpoint.changed:
            continue
        else:
            names = ", ".join((*trainer.checkpoint.changed, change.name))
            hint = f"if that is meant, write checkpoint.changed: [{names}]; else put it back as it was"
        reason = f"is not what the checkpoint {source.path} was trained with: {change.before} is now {change.after}"
        yield Problem(change.name, reason, hint)


def _is_short(value: Any) -> bool:
    """Whether a line shows all of it."""
    return not show(value).endswith("...")


@dataclass(frozen=True)
class _Change:
    """A key whose value is another than the checkpoint's."""

    section: str
    key: str
    before: Any
    after: Any

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"


def _differing(record: dict[str, Any], trainer: TrainerConfig) -> Iterator[_Change]:
    for section, keys in sections(trainer).items():
        saved = record.get(section)
        for key, value in keys.items():
            if isinstance(saved, dict) and key in saved and saved[key] != value:
                yield _Change(section, key, saved[key], value)


def _is_refused(
    change: _Change, trainer: TrainerConfig, source: _Source, *, weights_only: bool = False
) -> bool:
    """The trainer's verdict on this key alone."""
    if source.is_finished and not weights_only:
        return change.name not in FREE
    try:
        check_changes(
            {change.section: {change.key: change.before}},
            trainer,
            weights_only=weights_only or source.weights_only,
        )
    except TrainerError:
        return True
    return False
