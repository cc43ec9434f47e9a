"""Checkpoints as files: lists them, checks them against their records, and applies retention.

`trainer.checkpoint` writes and loads the tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.contract.evaluation import is_due
from trainer.contract.files.hashing import file_sha256, sha256
from trainer.contract.files.regular_file import IrregularFileError, read_bytes, read_text
from trainer.contract.problem import Problem
from trainer.contract.resuming import record_shape
from trainer.contract.wording import counted

TRACKER = "latest_checkpointed_iteration.txt"
"""File that tells Megatron-LM the newest complete checkpoint. This trainer relies on `COMPLETE` instead."""

BEST = "best_checkpointed_iteration.txt"
"""File that names the checkpoint of the best evaluation (checkpoint.keep_best)."""

COMPLETE = "COMPLETE"
"""Record of a checkpoint: the configuration it was saved with, and the size and SHA-256 of each file. Written last."""

STARTED = "STARTED"
"""First file of a save. Without COMPLETE next to it, the save was interrupted. Megatron-LM writes neither file."""

PINNED = "PINNED"
"""Empty file that marks a checkpoint as exempt from retention."""

METADATA = "metadata.json"
"""Last file that Megatron-Core writes into a checkpoint."""

INDEX = ".metadata"
"""List of a checkpoint's tensors, with their places in the other files (`trainer.contract.files.checkpoint_index`)."""

COMMON = "common.pt"
"""Values that are the same on all ranks. Megatron-Core reads this file, and versions up to 0.18 also write it."""

CHECKPOINT_VERSION = 3.0
"""Megatron-LM's version number for its parameter layout (QKV interleaved by group)."""

TRAINER_MARK = "saved_by_this_trainer"
"""Key of COMMON that marks this trainer's checkpoints.

Without the mark, a checkpoint of this trainer that has lost its record would look like one of Megatron-LM's.
"""

OLD_FORMAT = Problem(
    "",
    "it is in Megatron-LM's old format (--ckpt-format torch), which only Megatron-LM reads",
    "to convert it, start Megatron-LM with --ckpt-convert-format torch_dist --ckpt-convert-save DIRECTORY",
)

FORMAT = 1
"""Format of the record. A trainer refuses records with a later format."""

PREFIX = "iter_"
"""Prefix of the names of checkpoint directories. The iteration follows, with at least seven digits."""

_NAME = re.compile(rf"{PREFIX}(\d{{7,}})")
_REMOVING = ".removing"
_HASHING_THREADS = 8


class RecordError(ValueError):
    """The COMPLETE file is missing or damaged."""

    def __init__(self, reason: str) -> None:
        self.problem = Problem(COMPLETE, reason)
        super().__init__(str(self.problem))


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One `iter_...` directory."""

    path: Path
    iteration: int
    record: dict[str, Any] | None
    """Contents of COMPLETE; None when it is missing or damaged."""
    flaw: Problem | None
    """Reason why there is no record; None when there is one."""
    is_cut_off: bool
    """True if its save was interrupted or is still in progress."""
    is_foreign: bool
    """True if Megatron-LM wrote the checkpoint. Such a checkpoint has no record, and only Megatron-Core's own checks
    apply."""
    is_pinned: bool

    @property
    def is_complete(self) -> bool:
        """True if this trainer finished writing the checkpoint. `problems` checks that its files have not changed
        since."""
        return self.record is not None


def iteration_directory(directory: Path, iteration: int) -> Path:
    """Path of the checkpoint of an iteration, as Megatron-LM names it."""
    return directory / f"{PREFIX}{iteration:07d}"


def iteration_of(path: Path) -> int | None:
    """The iteration in the name of an `iter_...` directory; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return match and int(match[1])


def paths_to_load(load: Path) -> list[Path]:
    """The checkpoints that checkpoint.load names, newest first: a single one, or all in a directory.

    Raises:
        OSError: the directory cannot be read.
    """
    if iteration_of(load) is None:
        return list_paths(load)
    return [load] if load.is_dir() else []


def directory_of(load: Path) -> Path:
    """The directory of checkpoints that checkpoint.load names, or the directory of the single checkpoint that it
    names."""
    return load if iteration_of(load) is None else load.parent


def list_paths(directory: Path) -> list[Path]:
    """The `iter_...` directories in `directory`, newest first; empty when `directory` does not exist.

    Raises:
        OSError: the directory cannot be read.
    """
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except FileNotFoundError:
        return []
    found = sorted(
        ((int(match[1]), name) for name in names if (match := _NAME.fullmatch(name))), reverse=True
    )
    return [directory / name for _, name in found]


def list_checkpoints(directory: Path) -> list[Checkpoint]:
    """All checkpoints in `directory`, including incomplete ones, newest first. Empty if `directory` does not exist.

    Raises:
        OSError: the directory cannot be read.
    """
    return [describe(path) for path in list_paths(directory)]


def describe(path: Path) -> Checkpoint:
    """Describe the checkpoint in an `iter_...` directory. Anything else in it counts as an incomplete checkpoint.

    Raises:
        OSError: the directory cannot be read.
    """
    iteration = iteration_of(path)
    assert iteration is not None, path
    record: dict[str, Any] | None = None
    flaw = None
    try:
        record = read_record(path)
        if record["iteration"] != iteration:
            flaw = Problem(COMPLETE, f"belongs to iteration {record['iteration']}")
            record = None
    except RecordError as error:
        flaw = error.problem
    has_record = (path / COMPLETE).exists()
    # Megatron-LM and this trainer update the tracker only after a save is complete.
    was_complete = has_record or _is_tracked(path.parent, iteration)
    is_ours = (
        has_record or (path / STARTED).exists() or not (path / METADATA).exists() or _is_marked(path / COMMON)
    )
    if record is None and any(path.glob("mp_rank_*")):
        flaw = OLD_FORMAT
    elif not is_ours and not was_complete:
        flaw = Problem(COMPLETE, f"is missing, and {TRACKER} does not name it or a later one")
    return Checkpoint(
        path=path,
        iteration=iteration,
        record=record,
        flaw=None if was_complete and not is_ours else flaw,
        is_cut_off=not was_complete,
        is_foreign=was_complete and not is_ours,
        is_pinned=(path / PINNED).exists(),
    )


def _is_tracked(directory: Path, iteration: int) -> bool:
    """True if the tracker names this iteration or a later one."""
    tracked = tracked_iteration(directory)
    return tracked is not None and tracked >= iteration


def _is_marked(common: Path) -> bool:
    """True if this trainer wrote the COMMON file. Searches its bytes, since unpickling could run untrusted code."""
    try:
        return TRAINER_MARK.encode() in read_bytes(common)
    except FileNotFoundError:
        return False


def newest_complete(directory: Path) -> Checkpoint | None:
    """The newest complete checkpoint in `directory`, judged by the records alone; None if there is none.

    Raises:
        OSError: the directory cannot be read.
    """
    found = map(describe, list_paths(directory))
    return next((checkpoint for checkpoint in found if checkpoint.is_complete), None)


def tracked_iteration(directory: Path) -> int | None:
    """The iteration in the tracker file; None when the file is missing or damaged."""
    try:
        text = read_bytes(directory / TRACKER)[:32].strip()
    except (FileNotFoundError, IrregularFileError):
        return None
    return int(text) if text.isdigit() else None


def consumed_tokens(record: Mapping[str, Any]) -> int:
    """Number of tokens that the run had read. Earlier records do not have it, which matters if seq_length changed."""
    product: int = record["consumed_samples"] * record["model"]["seq_length"]
    found: int = record.get("consumed_tokens", product)
    return found


def read_record(path: Path) -> dict[str, Any]:
    """Contents of COMPLETE in the checkpoint `path`.

    Raises:
        RecordError: the file is missing, differs from what was written, or has a value of an invalid type.
        OSError: it cannot be read.
    """
    try:
        text = read_text(path / COMPLETE)
    except FileNotFoundError:
        raise RecordError("is missing") from None
    except IrregularFileError as error:
        raise RecordError(f"cannot be used: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RecordError("is not text") from None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"is not JSON ({error})") from None
    if not isinstance(record, dict) or record.pop("checksum", None) != _checksum(record):
        raise RecordError("was changed after it was written: its checksum differs")
    if problem := record_shape.problem(record, FORMAT):
        raise RecordError(f"is not a record of this trainer: {problem}")
    return record


def record_text(record: Mapping[str, Any]) -> str:
    """Text of COMPLETE for a record. It includes a checksum, so that a flipped bit is detected."""
    return json.dumps({**record, "checksum": _checksum(record)}, indent=1) + "\n"


def _checksum(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return sha256(text.encode())


def format_problem(path: Path, record: Mapping[str, Any]) -> str | None:
    """Why this version cannot use the checkpoint at `path` with this `record`; None if it can."""
    written = record.get("format", FORMAT)  # a checkpoint of Megatron-LM has none
    if written <= FORMAT:
        return None
    return f"{path} was written by a later version of the trainer (format {written}). Use that version"


def describe_file(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    """Size and SHA-256 of a file, as in the record. Calls `on_bytes` with the number of bytes of each read."""
    digest, size = file_sha256(path, on_bytes)
    return {"bytes": size, "sha256": digest}


def problems(checkpoint: Checkpoint, *, hashes: bool) -> list[Problem]:
    """Differences between a checkpoint and its record, including missing files; empty when it is valid.

    With `hashes`, reads every byte; without, checks only names and sizes. Checkpoints of Megatron-LM have no record,
    so their result is always empty.

    Raises:
        OSError: a file exists but cannot be read. Its content may still be valid.
    """
    if checkpoint.is_foreign:
        return []
    if checkpoint.record is None:
        return [checkpoint.flaw] if checkpoint.flaw else []
    return list(file_problems(checkpoint.path, checkpoint.record["files"], hashes=hashes).values())


def file_problems(
    path: Path,
    files: Mapping[str, Mapping[str, Any]],
    *,
    hashes: bool,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> dict[str, Problem]:
    """`problems` of some files of the checkpoint `path`, by name. `files` are their entries in the record.

    With `hashes`, threads call `on_bytes` with the number of bytes of each read.
    """

    def problem(name: str) -> Problem | None:
        try:
            size = (path / name).stat().st_size
            if size != files[name]["bytes"]:
                return Problem(name, f"has {size:,} bytes, not {files[name]['bytes']:,}")
            if hashes and describe_file(path / name, on_bytes) != files[name]:
                return Problem(name, "was changed after it was written: its SHA-256 differs")
        except FileNotFoundError:
            return Problem(name, "is missing")
        return None

    from concurrent.futures import ThreadPoolExecutor  # slow to import, and planning a run does not need it

    with ThreadPoolExecutor(_HASHING_THREADS) as threads:  # hashlib releases the GIL
        found = zip(files, threads.map(problem, files), strict=True)
        return {name: problem for name, problem in found if problem is not None}


def demote_incomplete(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Demotes checkpoints with missing or truncated files to incomplete.

    Checks names and sizes, so that retention never removes a valid checkpoint in favor of a damaged one.

    Raises:
        OSError: a file cannot be examined.
    """
    checked = []
    for checkpoint in checkpoints:
        found = problems(checkpoint, hashes=False) if checkpoint.is_complete else []
        checked.append(replace(checkpoint, record=None, flaw=_joined(found)) if found else checkpoint)
    return checked


def _joined(found: Sequence[Problem]) -> Problem:
    """The first problem, with the number of the others."""
    first, *others = found
    more = f", and {counted(len(others), 'more file')}" if others else ""
    return replace(first, reason=f"{first.reason}{more}")


def best_iteration(directory: Path) -> int | None:
    """Iteration of the best checkpoint (checkpoint.keep_best); None if none is named.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        text = read_text(directory / BEST, errors="replace").strip()
    except (FileNotFoundError, IrregularFileError):
        return None
    return int(text) if text.isdecimal() else None


def kept(
    checkpoints: Sequence[Checkpoint],
    keep_last: int | None,
    keep_every: int | None,
    evaluation_every: int | None = None,
    evaluated: Collection[int] = (),
    best: int | None = None,
) -> dict[int, str]:
    """Reasons to keep checkpoints, by iteration. Checkpoints that are not in the result may be removed.

    Only complete ones count towards `keep_last`, and only they are ever removed: an incomplete one may be a
    save in progress, and this trainer does not own those of Megatron-LM. None for `keep_last` keeps all.
    `evaluated` are the iterations with a result, and `best` is that of the best evaluation.
    """
    reasons = {}
    num_newer = 0
    for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint.iteration, reverse=True):
        reason = _reason_to_keep(checkpoint, num_newer, keep_last, keep_every)
        if reason is None and is_due(checkpoint.iteration, evaluation_every):
            reason = None if checkpoint.iteration in evaluated else "to be evaluated"
        if reason is None and checkpoint.iteration == best:
            reason = "the best"
        num_newer += checkpoint.is_complete
        if reason is not None:
            reasons[checkpoint.iteration] = reason
    return reasons


def _reason_to_keep(
    checkpoint: Checkpoint, num_newer: int, keep_last: int | None, keep_every: int | None
) -> str | None:
    if checkpoint.is_foreign:
        return "written by Megatron-LM"
    if not checkpoint.is_complete:
        return "not complete"
    if checkpoint.is_pinned:
        return "pinned"
    if num_newer == 0:
        return "the newest"
    if keep_last is None:
        return "keep_last is null"
    if num_newer < keep_last:
        return f"keep_last = {keep_last}"
    if keep_every is not None and checkpoint.iteration % keep_every == 0:
        return f"keep_every = {keep_every}"
    return None


def remove(path: Path) -> None:
    """Removes a checkpoint. Renames it first, so that an interrupted removal does not look like damage."""
    hidden = path.with_name(f".{path.name}{_REMOVING}")
    if hidden.exists():  # an earlier removal was interrupted
        shutil.rmtree(hidden)
    path.rename(hidden)
    shutil.rmtree(hidden)


def sweep(directory: Path) -> None:
    """Removes leftovers of interrupted saves and removals from `directory`, which this process has locked."""
    for hidden in directory.glob(f".{PREFIX}*{_REMOVING}"):
        shutil.rmtree(hidden, ignore_errors=True)
    for unpublished in directory.glob(f".{TRACKER}.*"):
        with contextlib.suppress(OSError):
            unpublished.unlink()


def set_aside(path: Path) -> Path:
    """Renames a broken checkpoint to `NAME.broken`, or to `NAME.broken-2` and so on, and keeps it for inspection."""
    names = [f"{path.name}.broken", *(f"{path.name}.broken-{number}" for number in range(2, 1000))]
    target = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    path.rename(target)
    return target
