"""Where checkpoints are, and whether they are as they were written."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcgen.errors import HpcgenError
from hpcgen.run_config import read_run_config
from trainer.contract import checkpoint_files
from trainer.contract.checkpoint_files import Checkpoint

SET_ASIDE = re.compile(r"iter_(\d+)\.broken(?:-\d+)?")
"""What the trainer calls a broken checkpoint."""
_BATCH = 16
"""Files that are looked at between two words of progress."""


def find_directory(path: Path) -> Path:
    """The directory with the checkpoints: `path` itself, or that of the run in `path`.

    Raises:
        HpcgenError: there is none.
    """
    if not _is_directory(path):
        what = "is a file" if path.exists() else "no such directory"
        raise HpcgenError(f"{path}: {what}", "name a run's directory, or one that holds iter_... directories")
    if any(path.glob("iter_*")):
        return path
    saved = checkpoint_section(read_run_config(path)[0]).get("save")
    for candidate in (*([Path(saved)] if isinstance(saved, str) else []), path / "checkpoints"):
        if _is_directory(candidate):
            return candidate
    if path.name == "checkpoints" or (path / checkpoint_files.TRACKER).exists():
        return path
    raise HpcgenError(
        f"{path}: holds no checkpoints", "name a run's directory, or one that holds iter_... directories"
    )


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint `path`; of a run, or a directory of checkpoints, the newest one that is complete.

    Raises:
        HpcgenError: there is none.
    """
    if path.absolute().name.startswith("iter_"):
        return find_exactly(path)
    directory = find_directory(path)
    found = read_directory(directory)
    for checkpoint in found:
        if checkpoint.is_complete or checkpoint.is_foreign:
            return checkpoint
    raise HpcgenError(
        f"{directory}: holds no complete checkpoint",
        f"look at hpcgen checkpoint list {path}" if found else "",
    )


def find_exactly(path: Path) -> Checkpoint:
    """The checkpoint whose directory is `path`, be it one that was set aside.

    Raises:
        HpcgenError: it is not there, or not a checkpoint.
    """
    absolute = path.absolute()
    if not _is_directory(path):
        near = [checkpoint.path.name for checkpoint in read_directory(absolute.parent)[:3]]
        raise HpcgenError(f"{path}: no such directory", f"there are {', '.join(near)}" if near else "")
    if SET_ASIDE.fullmatch(absolute.name):
        return _read_set_aside(path)
    for checkpoint in read_directory(absolute.parent):
        if checkpoint.path.name == absolute.name:
            return dataclasses.replace(checkpoint, path=path)
    raise HpcgenError(f"{path}: is not a checkpoint", "name a directory iter_...")


def read_directory(directory: Path) -> list[Checkpoint]:
    """The checkpoints in a directory, newest first.

    Raises:
        HpcgenError: it cannot be read.
    """
    try:
        return checkpoint_files.list_checkpoints(directory)
    except OSError as error:
        raise cannot(error, directory, "read") from error


def find_problems(
    checkpoint: Checkpoint, *, hashes: bool, on_bytes: Callable[[int], None] = lambda count: None
) -> list[str]:
    """What of a checkpoint is missing or differs from its record; `on_bytes` is told of what is looked at.

    Raises:
        HpcgenError: a file cannot be read.
    """
    try:
        if checkpoint.record is None:
            return checkpoint_files.problems(checkpoint, hashes=hashes)
        files: dict[str, dict[str, Any]] = checkpoint.record["files"]
        problems = []
        for names in _batches(list(files)):
            batch = {name: files[name] for name in names}
            problems += checkpoint_files.file_problems(checkpoint.path, batch, hashes=hashes)
            on_bytes(sum(file["bytes"] for file in batch.values()))
        return problems
    except OSError as error:
        raise cannot(error, checkpoint.path, "read") from error


def whole_ones(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The same checkpoints, of which those whose files are not there as recorded do not count as complete.

    Raises:
        HpcgenError: a file cannot be looked at.
    """
    try:
        return checkpoint_files.whole_ones(checkpoints)
    except OSError as error:
        raise cannot(error, checkpoints[0].path.parent, "read") from error


def cannot(error: OSError, path: Path, be: str) -> HpcgenError:
    """What to say when `path`, or what the error names, cannot be read, removed and so on."""
    return HpcgenError(f"{error.filename or path}: cannot be {be} ({error.strerror})")


def set_aside_ones(directory: Path) -> list[Path]:
    """The broken checkpoints in `directory` that the trainer renamed, newest first."""
    try:
        found = [path for path in directory.iterdir() if SET_ASIDE.fullmatch(path.name)]
    except OSError as error:
        raise cannot(error, directory, "read") from error
    return sorted(found, reverse=True)


def set_aside_iteration(path: Path) -> int:
    """The iteration in the name of a checkpoint that was set aside."""
    match = SET_ASIDE.fullmatch(path.absolute().name)
    assert match is not None
    return int(match[1])


def checkpoint_section(config: dict[str, Any]) -> dict[str, Any]:
    """The section `checkpoint` of a run's configuration; empty where there is none."""
    section = config.get("checkpoint")
    return section if isinstance(section, dict) else {}


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:  # what leads there is not ours to look into
        raise cannot(error, path, "read") from error


def _read_set_aside(path: Path) -> Checkpoint:
    record, flaw = None, None
    try:
        record = checkpoint_files.read_record(path)
    except (checkpoint_files.RecordError, OSError) as error:
        flaw = str(error)
    return Checkpoint(
        path=path,
        iteration=set_aside_iteration(path),
        record=record,
        flaw=flaw,
        is_cut_off=False,
        is_foreign=False,
        is_pinned=False,
    )


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Few enough for a bar to move, and enough to read several at a time."""
    for first in range(0, len(names), _BATCH):
        yield names[first : first + _BATCH]
