"""Finds checkpoints and checks their files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcgen.checkpoints.run_config import read_run_config
from hpcgen.errors import HpcgenError, Problem
from trainer.contract.files import checkpoint_files, checkpoint_index
from trainer.contract.files.checkpoint_files import INDEX, PREFIX, Checkpoint
from trainer.contract.files.run_directory import RunDirectory

SET_ASIDE = re.compile(r"iter_(\d+)\.broken(?:-\d+)?")
"""Name of a broken checkpoint that the trainer has set aside."""
_BATCH = 16
"""Number of files to check between two progress updates."""


def find_directory(path: Path) -> Path:
    """Finds the checkpoint directory: `path` itself, or the checkpoint directory of the run in `path`.

    Raises:
        HpcgenError: no directory with checkpoints is found.
    """
    if not _is_directory(path):
        what = "not a directory" if path.exists() else "no such directory"
        raise HpcgenError(what, "give a run directory, or a directory with iter_... directories", where=path)
    if any(path.glob("iter_*")):
        return path
    recorded = RunDirectory.recorded(path, read_run_config(path)[0])
    for candidate in (recorded.checkpoints, RunDirectory.at(path).checkpoints):  # the run may have been moved
        if _is_directory(candidate):
            return candidate
    if path.name == RunDirectory.CHECKPOINTS or (path / checkpoint_files.TRACKER).exists():
        return path
    raise HpcgenError(
        f"{path} has no checkpoints", "give a run directory, or a directory with iter_... directories"
    )


def find_checkpoint(path: Path) -> Checkpoint:
    """Finds the checkpoint at `path`, or the newest complete one in a run directory or checkpoint directory.

    Raises:
        HpcgenError: there is no such checkpoint.
    """
    if path.absolute().name.startswith(PREFIX):
        return find_exactly(path)
    directory = find_directory(path)
    found = read_directory(directory)
    for checkpoint in found:
        if checkpoint.is_complete or checkpoint.is_foreign:
            return checkpoint
    raise HpcgenError(
        f"{directory} has no complete checkpoint",
        f"run hpcgen checkpoint list {path} to see the incomplete ones" if found else "",
    )


def find_exactly(path: Path) -> Checkpoint:
    """Finds the checkpoint whose directory is `path`, including one that was set aside.

    Raises:
        HpcgenError: the directory is missing, or is not a checkpoint.
    """
    absolute = path.absolute()
    if not _is_directory(path):
        near = [checkpoint.path.name for checkpoint in read_directory(absolute.parent)[:3]]
        raise HpcgenError(
            "no such directory", f"the newest are {', '.join(near)}" if near else "", where=path
        )
    if SET_ASIDE.fullmatch(absolute.name):
        return _read_set_aside(path)
    for checkpoint in read_directory(absolute.parent):
        if checkpoint.path.name == absolute.name:
            return dataclasses.replace(checkpoint, path=path)
    raise HpcgenError(f"{path} is not a checkpoint", "give an iter_... directory")


def read_directory(directory: Path) -> list[Checkpoint]:
    """Lists the checkpoints in a directory, newest first.

    Raises:
        HpcgenError: the directory cannot be read.
    """
    try:
        return checkpoint_files.list_checkpoints(directory)
    except OSError as error:
        raise file_error(error, directory, "read") from error


def find_problems(
    checkpoint: Checkpoint, *, hashes: bool, on_bytes: Callable[[int], None] = lambda count: None
) -> list[Problem]:
    """Lists the files of a checkpoint that are missing or differ from its record, and an index that cannot be read.

    Calls `on_bytes` with the size of each batch of checked files.

    Raises:
        HpcgenError: a file cannot be read.
    """
    try:
        if checkpoint.record is None:
            return checkpoint_files.problems(checkpoint, hashes=hashes) or _index_problems(checkpoint)
        files: dict[str, dict[str, Any]] = checkpoint.record["files"]
        problems: list[Problem] = []
        for names in _batches(list(files)):
            batch = {name: files[name] for name in names}
            problems += checkpoint_files.file_problems(checkpoint.path, batch, hashes=hashes).values()
            on_bytes(sum(file["bytes"] for file in batch.values()))
        return problems or _index_problems(checkpoint)
    except OSError as error:
        raise file_error(error, checkpoint.path, "read") from error


def demote_incomplete(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Demotes checkpoints with missing or truncated files, or an index that cannot be read, to incomplete.

    Raises:
        HpcgenError: a file cannot be accessed.
    """
    try:
        return list(map(_demote_unreadable, checkpoint_files.demote_incomplete(checkpoints)))
    except OSError as error:
        raise file_error(error, checkpoints[0].path.parent, "read") from error


def _demote_unreadable(checkpoint: Checkpoint) -> Checkpoint:
    if checkpoint.flaw is None and (problems := _index_problems(checkpoint)):
        return dataclasses.replace(checkpoint, record=None, flaw=problems[0])
    return checkpoint


def _index_problems(checkpoint: Checkpoint) -> list[Problem]:
    """Why the trainer cannot read the index, which would also stop a run that resumes from it."""
    problem = checkpoint_index.problem(checkpoint.path) if (checkpoint.path / INDEX).exists() else None
    return [problem] if problem else []


def file_error(error: OSError, path: Path, operation: str) -> HpcgenError:
    """Error for a failed operation on a file; `path` is used if `error` has no file name."""
    return HpcgenError(f"cannot {operation} {error.filename or path}: {error.strerror}")


def set_aside_paths(directory: Path) -> list[Path]:
    """Paths of the broken checkpoints in `directory` that the trainer has set aside, newest first."""
    try:
        found = [path for path in directory.iterdir() if SET_ASIDE.fullmatch(path.name)]
    except OSError as error:
        raise file_error(error, directory, "read") from error
    return sorted(found, reverse=True)


def set_aside_iteration(path: Path) -> int:
    """Iteration in the name of a checkpoint that was set aside."""
    match = SET_ASIDE.fullmatch(path.absolute().name)
    assert match is not None
    return int(match[1])


def checkpoint_section(config: dict[str, Any]) -> dict[str, Any]:
    """Section `checkpoint` of a run's configuration; empty if it is missing."""
    section = config.get("checkpoint")
    return section if isinstance(section, dict) else {}


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:  # a parent directory is not accessible
        raise file_error(error, path, "read") from error


def _read_set_aside(path: Path) -> Checkpoint:
    record, flaw = None, None
    try:
        record = checkpoint_files.read_record(path)
    except checkpoint_files.RecordError as error:
        flaw = error.problem
    except OSError as error:
        flaw = Problem("", str(error))
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
    """Splits names into batches: small enough for progress updates, large enough to read files in parallel."""
    for first in range(0, len(names), _BATCH):
        yield names[first : first + _BATCH]
