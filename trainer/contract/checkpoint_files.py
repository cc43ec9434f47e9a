"""Checkpoints as files: which a directory holds, whether one is whole, which of them stay.

hpcgen reads checkpoints through this module too, so it needs nothing but the standard library. What writes
and loads their tensors is `trainer.checkpoint`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.contract import record_shape

TRACKER = "latest_checkpointed_iteration.txt"
"""Names the newest complete checkpoint to Megatron-LM. Here it is only written: `COMPLETE` is what counts."""

COMPLETE = "COMPLETE"
"""The record of a checkpoint: what it was saved with, and the size and SHA-256 of each file. Written last."""

STARTED = "STARTED"
"""The first file of a save: without COMPLETE beside it, the save was cut off. Megatron-LM's have neither."""

PINNED = "PINNED"
"""An empty file in a checkpoint that retention never removes."""

METADATA = "metadata.json"
"""The last file that Megatron-Core writes into a checkpoint."""

COMMON = "common.pt"
"""The values that are the same on all ranks. Megatron-Core reads them there, and up to 0.18 writes them there too."""

MARK = "saved_by_this_trainer"
"""A key of COMMON: ours that has lost its record must not pass for Megatron-LM's, which has none to check."""

OLD_FORMAT = (
    "it is in Megatron-LM's old format (--ckpt-format torch), which only Megatron-LM reads; it saves one in the new "
    "format with --ckpt-convert-format torch_dist --ckpt-convert-save DIRECTORY"
)

FORMAT = 1
"""Of the record. A trainer refuses a later one."""

_NAME = re.compile(r"iter_(\d{7,})")
_REMOVING = ".removing"
_HASHING_THREADS = 8
_BLOCK = 4 * 2**20
"""Bytes that are read at a time."""


class RecordError(ValueError):
    """A COMPLETE file that is missing or not as it was written; the message says which."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One `iter_...` directory."""

    path: Path
    iteration: int
    record: dict[str, Any] | None
    """What COMPLETE holds; None when that is missing or damaged."""
    flaw: str | None
    """Why there is no record; None when there is one."""
    is_cut_off: bool
    """Whether its save did not end, so that it never was a checkpoint (or is still being written)."""
    is_foreign: bool
    """Whether Megatron-LM wrote it: it has no record, and Core's own checks must do."""
    is_pinned: bool

    @property
    def is_complete(self) -> bool:
        """Whether all of it was written, by this trainer; `problems` tells whether it still is as written."""
        return self.record is not None


def iteration_directory(directory: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies, as Megatron-LM names it."""
    return directory / f"iter_{iteration:07d}"


def list_paths(directory: Path) -> list[Path]:
    """The `iter_...` directories in `directory`, newest first; none when it does not exist.

    Raises:
        OSError: the directory cannot be read. That is not the same as holding nothing.
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
    """The checkpoints in `directory`, newest first, incomplete ones too; none when it does not exist.

    Raises:
        OSError: the directory cannot be read. That is not the same as holding nothing.
    """
    return [describe(path) for path in list_paths(directory)]


def describe(path: Path) -> Checkpoint:
    """The checkpoint in an `iter_...` directory; an incomplete one when there is none.

    Raises:
        OSError: it cannot be read.
    """
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    iteration = int(match[1])
    record: dict[str, Any] | None = None
    flaw = None
    try:
        record = read_record(path)
        if record["iteration"] != iteration:
            flaw = f"{COMPLETE} is that of iteration {record['iteration']}"
            record = None
    except RecordError as error:
        flaw = str(error)
    has_record = (path / COMPLETE).exists()
    # Megatron-LM and this trainer move the tracker when a save is complete, and never before.
    was_complete = has_record or _is_tracked(path.parent, iteration)
    is_ours = (
        has_record or (path / STARTED).exists() or not (path / METADATA).exists() or _is_marked(path / COMMON)
    )
    if record is None and any(path.glob("mp_rank_*")):
        flaw = OLD_FORMAT
    elif not is_ours and not was_complete:
        flaw = f"{COMPLETE} is missing, and {TRACKER} does not name it or a later one"
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
    """Whether the tracker names this iteration or a later one."""
    tracked = tracked_iteration(directory)
    return tracked is not None and tracked >= iteration


def _is_marked(common: Path) -> bool:
    """Whether this trainer wrote a COMMON. Its bytes are searched: to load it would be to trust it."""
    try:
        return MARK.encode() in common.read_bytes()
    except FileNotFoundError:
        return False


def newest_complete(directory: Path) -> Checkpoint | None:
    """The newest complete checkpoint in `directory`, by its record alone; None without one.

    Raises:
        OSError: the directory cannot be read.
    """
    found = map(describe, list_paths(directory))
    return next((checkpoint for checkpoint in found if checkpoint.is_complete), None)


def tracked_iteration(directory: Path) -> int | None:
    """The iteration that the tracker names; None when it is missing or torn."""
    try:
        text = (directory / TRACKER).read_bytes()[:32].strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdigit() else None


def read_record(path: Path) -> dict[str, Any]:
    """What COMPLETE in the checkpoint `path` holds.

    Raises:
        RecordError: it is missing, its text is not what was written, or a value has a type that no record has.
        OSError: it cannot be read.
    """
    try:
        text = (path / COMPLETE).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecordError(f"{COMPLETE} is missing") from None
    except UnicodeDecodeError:
        raise RecordError(f"{COMPLETE} is not text") from None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{COMPLETE} is not JSON ({error})") from None
    if not isinstance(record, dict) or record.pop("checksum", None) != _checksum(record):
        raise RecordError(f"{COMPLETE} is not as it was written: its checksum differs")
    if reason := record_shape.problem(record, FORMAT):
        raise RecordError(f"{COMPLETE} is no record of this trainer: {reason}")
    return record


def record_text(record: Mapping[str, Any]) -> str:
    """The text of COMPLETE for a record, with a checksum over it: a flipped bit must not pass for a value."""
    return json.dumps({**record, "checksum": _checksum(record)}, indent=1) + "\n"


def _checksum(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def describe_file(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    """Size and SHA-256 of a file, as the record holds them; `on_bytes` is told of each part that was read."""
    sha256, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            sha256.update(block)
            size += len(block)
            on_bytes(len(block))
    return {"bytes": size, "sha256": sha256.hexdigest()}


def problems(checkpoint: Checkpoint, *, hashes: bool) -> list[str]:
    """What of a checkpoint is missing or differs from its record; empty when it is whole.

    With `hashes`, every byte is read; without, only names and sizes. Of Megatron-LM's nothing is known: empty.

    Raises:
        OSError: a file that is there cannot be read, which tells nothing about what it holds.
    """
    if checkpoint.is_foreign:
        return []
    if checkpoint.record is None:
        return [str(checkpoint.flaw)]
    return file_problems(checkpoint.path, checkpoint.record["files"], hashes=hashes)


def file_problems(
    path: Path,
    files: Mapping[str, Mapping[str, Any]],
    *,
    hashes: bool,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """`problems` of some files of the checkpoint `path`, given as its record lists them.

    With `hashes`, threads tell `on_bytes` what they have read.
    """

    def problem(name: str) -> str | None:
        try:
            size = (path / name).stat().st_size
            if size != files[name]["bytes"]:
                return f"{name} has {size:,} bytes, not {files[name]['bytes']:,}"
            if hashes and describe_file(path / name, on_bytes) != files[name]:
                return f"{name} is not as it was written: its SHA-256 differs"
        except FileNotFoundError:
            return f"{name} is missing"
        return None

    with ThreadPoolExecutor(_HASHING_THREADS) as threads:  # hashlib lets go of the interpreter lock
        return [found for found in threads.map(problem, files) if found is not None]


def whole_ones(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The same checkpoints, of which those whose files are not there as recorded do not count as complete.

    Names and sizes are looked at; so a damaged one never makes a whole one superfluous.

    Raises:
        OSError: a file cannot be looked at.
    """
    looked_at = []
    for checkpoint in checkpoints:
        found = problems(checkpoint, hashes=False) if checkpoint.is_complete else []
        more = f", and {len(found) - 1} more files" if len(found) > 1 else ""
        looked_at.append(replace(checkpoint, record=None, flaw=found[0] + more) if found else checkpoint)
    return looked_at


def kept(checkpoints: Sequence[Checkpoint], keep_last: int | None, keep_every: int | None) -> dict[int, str]:
    """Why each checkpoint that stays does, by iteration; one that is not named may be removed.

    Only complete ones count towards `keep_last`, and only they are ever removed: an incomplete one may be a
    save in progress, and Megatron-LM's are not ours. `keep_last` null keeps all.
    """
    reasons = {}
    num_newer = 0
    for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint.iteration, reverse=True):
        reason = _reason_to_keep(checkpoint, num_newer, keep_last, keep_every)
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
    """Removes a checkpoint. It is renamed first: one that is half gone must not look like one that is damaged."""
    hidden = path.with_name(f".{path.name}{_REMOVING}")
    if hidden.exists():  # a removal that was cut off
        shutil.rmtree(hidden)
    path.rename(hidden)
    shutil.rmtree(hidden)


def sweep(directory: Path) -> None:
    """Removes what a save or a removal that was cut off left in `directory`, which this process has locked."""
    for hidden in directory.glob(f".iter_*{_REMOVING}"):
        shutil.rmtree(hidden, ignore_errors=True)
    for unpublished in directory.glob(f".{TRACKER}.*"):
        with contextlib.suppress(OSError):
            unpublished.unlink()


def set_aside(path: Path) -> Path:
    """Renames a broken checkpoint, which stays to be looked at, to `NAME.broken`, or `-2` and so on after it."""
    names = [f"{path.name}.broken", *(f"{path.name}.broken-{number}" for number in range(2, 1000))]
    target = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    path.rename(target)
    return target
