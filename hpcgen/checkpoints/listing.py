"""A list of checkpoints, with what there is to say of each."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcgen.checkpoints.finding import read_directory, set_aside_iteration, set_aside_ones, whole_ones
from hpcgen.checkpoints.retention import Retention
from trainer.contract import checkpoint_files
from trainer.contract.checkpoint_files import Checkpoint

State = Literal["complete", "damaged", "incomplete", "Megatron-LM's", "set aside"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint, as a list shows it."""

    path: Path
    iteration: int
    state: State
    problem: str | None
    """What is wrong with it, in one sentence."""
    time: float | None
    """When it became complete (Unix seconds)."""
    bytes: int
    is_pinned: bool
    kept_by: str | None
    """Why retention leaves it; None for one that may go."""


def list_entries(directory: Path, retention: Retention) -> list[Entry]:
    """Every checkpoint in `directory`, newest first, then those that were set aside as broken."""
    checkpoints = read_directory(directory)
    looked_at = whole_ones(checkpoints)
    kept = checkpoint_files.kept(looked_at, retention.keep_last, retention.keep_every)
    entries = [
        Entry(
            path=checkpoint.path,
            iteration=checkpoint.iteration,
            state=_state(checkpoint, seen),
            problem=_begun(checkpoint) if checkpoint.is_cut_off else seen.flaw,
            time=checkpoint.record.get("time") if checkpoint.record else None,
            bytes=size_of(checkpoint),
            is_pinned=checkpoint.is_pinned,
            kept_by=kept.get(checkpoint.iteration),
        )
        for checkpoint, seen in zip(checkpoints, looked_at, strict=True)
    ]
    return [*entries, *list_set_aside(directory)]


def list_set_aside(directory: Path) -> list[Entry]:
    """Those in `directory` that the trainer found broken and renamed; no rule of retention removes them."""
    return [_set_aside(path) for path in set_aside_ones(directory)]


def size_of(checkpoint: Checkpoint) -> int:
    """Bytes of its files: as recorded, or where there is no record as they are."""
    if checkpoint.record is not None:
        return sum(file["bytes"] for file in checkpoint.record["files"].values())
    return _directory_size(checkpoint.path)


def _directory_size(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the trainer may be writing there, or removing
            total += file.lstat().st_size if file.is_file() else 0
    return total


def _state(checkpoint: Checkpoint, seen: Checkpoint) -> State:
    if checkpoint.is_foreign:
        return "Megatron-LM's"
    if seen.is_complete:
        return "complete"
    return "incomplete" if checkpoint.is_cut_off else "damaged"


def _begun(checkpoint: Checkpoint) -> str:
    """What there is to say of a save that has not ended."""
    try:
        begun = (
            (checkpoint.path / checkpoint_files.STARTED).read_text(encoding="utf-8", errors="replace").strip()
        )
    except OSError:
        return str(checkpoint.flaw)
    return f"its save was cut off, or goes on: begun {begun}"


def _set_aside(path: Path) -> Entry:
    return Entry(
        path=path,
        iteration=set_aside_iteration(path),
        state="set aside",
        problem="the trainer found it broken; once it was looked at, prune --broken removes it",
        time=None,
        bytes=_directory_size(path),
        is_pinned=False,
        kept_by="set aside",
    )
