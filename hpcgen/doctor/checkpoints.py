"""Checkpoints of a run that are damaged, interrupted or lost, and what the next start makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcgen.checkpoints.finding import demote_incomplete, read_directory, set_aside_paths
from hpcgen.doctor.cause import Cause
from hpcgen.doctor.run_files import RunFiles
from hpcgen.errors import HpcgenError
from hpcgen.text import counted, few
from trainer.contract.files.checkpoint_files import TRACKER, Checkpoint, tracked_iteration
from trainer.contract.files.shared_files import foreign_link
from trainer.contract.resuming import evidence

COMPLETE_PAGE = "checkpoints.md#what-makes-a-checkpoint-complete"
LOST_PAGE = "checkpoints.md#start-over"


def causes(files: RunFiles) -> Iterator[Cause]:
    """Yields what is wrong with the checkpoints. A link of another user is a cause of its own."""
    directory = files.checkpoints
    if directory.is_relative_to(files.directory) and foreign_link(directory, files.directory) is not None:
        return
    try:
        found = demote_incomplete(listed) if (listed := read_directory(directory)) else []
        aside = set_aside_paths(directory) if directory.is_dir() else []
    except HpcgenError as error:
        yield _unreadable(files, str(error))
        return
    valid = next((each for each in found if each.flaw is None), None)
    if valid is None:
        yield from _lost(files, found)
        return
    newer = [each for each in found if each.flaw is not None and each.iteration > valid.iteration]
    yield from _passed_over([each for each in newer if not each.is_cut_off], valid)
    yield from _interrupted(files, [each for each in newer if each.is_cut_off], valid)
    yield from _set_aside(aside, valid)
    yield from _tracker(directory, found, valid)


def _unreadable(files: RunFiles, reason: str) -> Cause:
    return Cause(
        name="checkpoints-unreadable",
        effect="blocks" if files.is_own else "harmless",
        what="The checkpoints cannot be read",
        evidence=(reason,),
        fix=f"Give this user access to {files.checkpoints}, or mount its file system here.",
        page=LOST_PAGE,
    )


def _lost(files: RunFiles, found: Sequence[Checkpoint]) -> Iterator[Cause]:
    """Yields the reason for which the trainer would refuse to start over."""
    keys = files.trainer.checkpoint if files.trainer else None
    try:
        refusal = evidence.refusal(
            files.run_directory,
            keys.load if keys else None,
            begins_at=0,
            discard_up_to=keys.discard_up_to if keys else None,
        )
    except OSError as error:
        yield _unreadable(files, f"{error.filename or files.checkpoints}: {error.strerror}")
        return
    if refusal is None:
        return
    broken = [f"{each.path}: {each.flaw}" for each in found[:3]]
    missing = () if files.checkpoints.exists() else (f"{files.checkpoints}: no such directory",)
    yield Cause(
        name="no-valid-checkpoint",
        effect="blocks",
        what="The run has saved training, and no valid checkpoint is left to resume from",
        evidence=(*missing, *broken, refusal.reason),
        fix=f"{refusal.hint[:1].upper()}{refusal.hint[1:]}.",
        page=LOST_PAGE,
    )


def _passed_over(damaged: Sequence[Checkpoint], valid: Checkpoint) -> Iterator[Cause]:
    if not damaged:
        return
    lost = damaged[0].iteration - valid.iteration
    yield Cause(
        name="damaged-checkpoint",
        effect="costs",
        what=f"{_named(damaged)} newer than {valid.path.name} {'is' if len(damaged) == 1 else 'are'} damaged",
        evidence=tuple(f"{each.path}: {each.flaw}" for each in damaged[:3]),
        fix="Restore the files from a copy. Otherwise submit again: the next start sets the damaged directory aside "
        f"and resumes from {valid.path.name}, so {counted(lost, 'step')} {'is' if lost == 1 else 'are'} repeated.",
        page=COMPLETE_PAGE,
    )


def _interrupted(files: RunFiles, cut_off: Sequence[Checkpoint], valid: Checkpoint) -> Iterator[Cause]:
    if not cut_off or files.state == "running":
        return
    yield Cause(
        name="interrupted-save",
        effect="harmless",
        what=f"The save of {_named(cut_off)} was interrupted",
        evidence=tuple(f"{each.path}: {each.flaw}" for each in cut_off[:3]),
        fix=f"Nothing. The next start removes it and resumes from {valid.path.name}.",
        page=COMPLETE_PAGE,
    )


def _set_aside(paths: Sequence[Path], valid: Checkpoint) -> Iterator[Cause]:
    if not paths:
        return
    yield Cause(
        name="checkpoint-set-aside",
        effect="harmless",
        what=f"The trainer has set aside {counted(len(paths), 'broken checkpoint')}",
        evidence=(few([str(path) for path in paths]),),
        fix=f"Nothing to resume: the next start uses {valid.path.name}. To free the space, run "
        f"hpcgen checkpoint prune --broken {paths[0].parent}.",
        page=COMPLETE_PAGE,
    )


def _tracker(directory: Path, found: Sequence[Checkpoint], valid: Checkpoint) -> Iterator[Cause]:
    """Yields a tracker that is damaged or names no checkpoint."""
    tracked = tracked_iteration(directory)
    if (
        valid.is_foreign
        or tracked in [each.iteration for each in found]
        or not (directory / TRACKER).exists()
    ):
        return
    shown = "is damaged" if tracked is None else f"names iteration {tracked}"
    yield Cause(
        name="wrong-tracker",
        effect="harmless",
        what=f"{TRACKER} does not name the newest valid checkpoint",
        evidence=(f"{directory / TRACKER}:1: {shown}, and the newest valid one is {valid.path.name}",),
        fix="Nothing: only Megatron-LM reads it, and the next save of the run writes it again.",
        page=COMPLETE_PAGE,
    )


def _named(checkpoints: Sequence[Checkpoint]) -> str:
    return few([each.path.name for each in checkpoints])
