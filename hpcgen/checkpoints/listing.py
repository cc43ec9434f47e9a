"""Listing of checkpoints with their state, size and retention."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcgen.checkpoints.finding import demote_incomplete, read_directory, set_aside_iteration, set_aside_paths
from hpcgen.checkpoints.retention import Retention
from trainer.contract.evaluation import is_due
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import Checkpoint
from trainer.contract.files.regular_file import read_text

State = Literal["complete", "damaged", "incomplete", "Megatron-LM's", "set aside"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint of a listing."""

    path: Path
    iteration: int
    state: State
    problem: str | None
    """Description of the problem; None if there is none."""
    time: float | None
    """Time at which the checkpoint became complete (Unix time in seconds)."""
    bytes: int
    is_pinned: bool
    kept_by: str | None
    """Reason why retention keeps the checkpoint; None if it may be removed."""
    evaluation: Literal["evaluated", "to be evaluated"] | None = None
    """None if the checkpoint has no result and evaluation.every does not select it."""


def list_entries(directory: Path, retention: Retention) -> list[Entry]:
    """Lists every checkpoint in `directory`, newest first, followed by checkpoints set aside as broken."""
    checkpoints = read_directory(directory)
    checked = demote_incomplete(checkpoints)
    kept = retention.kept(checked)
    entries = [
        Entry(
            path=checkpoint.path,
            iteration=checkpoint.iteration,
            state=_state(checkpoint, seen),
            problem=_problem(checkpoint, seen),
            time=checkpoint.record.get("time") if checkpoint.record else None,
            bytes=size_of(checkpoint),
            is_pinned=checkpoint.is_pinned,
            kept_by=kept.get(checkpoint.iteration),
            evaluation=_evaluation(seen, retention),
        )
        for checkpoint, seen in zip(checkpoints, checked, strict=True)
    ]
    return [*entries, *list_set_aside(directory)]


def list_set_aside(directory: Path) -> list[Entry]:
    """Lists checkpoints in `directory` that the trainer set aside as broken. Retention never removes them."""
    return [_set_aside(path) for path in set_aside_paths(directory)]


def size_of(checkpoint: Checkpoint) -> int:
    """Total size of a checkpoint's files in bytes, from its record if there is one, otherwise from the files."""
    if checkpoint.record is not None:
        return sum(file["bytes"] for file in checkpoint.record["files"].values())
    return _directory_size(checkpoint.path)


def _directory_size(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the trainer may be writing or removing it
            total += file.lstat().st_size if file.is_file() else 0
    return total


def _state(checkpoint: Checkpoint, seen: Checkpoint) -> State:
    if seen.flaw is None:
        return "Megatron-LM's" if checkpoint.is_foreign else "complete"
    return "incomplete" if checkpoint.is_cut_off else "damaged"


def _evaluation(
    checkpoint: Checkpoint, retention: Retention
) -> Literal["evaluated", "to be evaluated"] | None:
    if checkpoint.iteration in retention.evaluated:
        return "evaluated"
    awaited = checkpoint.is_complete and is_due(checkpoint.iteration, retention.evaluation_every)
    return "to be evaluated" if awaited else None


def _problem(checkpoint: Checkpoint, seen: Checkpoint) -> str | None:
    if checkpoint.is_cut_off:
        return _unfinished_save(checkpoint)
    return str(seen.flaw) if seen.flaw else None


def _unfinished_save(checkpoint: Checkpoint) -> str:
    """Describes a save that has not finished."""
    try:
        started = read_text(checkpoint.path / checkpoint_files.STARTED, errors="replace").strip()
    except OSError:
        return str(checkpoint.flaw)
    return f"the save started {started} was interrupted or is still running"


def _set_aside(path: Path) -> Entry:
    return Entry(
        path=path,
        iteration=set_aside_iteration(path),
        state="set aside",
        problem="the trainer found it broken; after inspection, remove it with prune --broken",
        time=None,
        bytes=_directory_size(path),
        is_pinned=False,
        kept_by="set aside",
    )
