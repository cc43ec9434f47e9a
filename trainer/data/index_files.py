"""The index files of datasets: written atomically, recorded, and checked before they are mapped.

Core itself only checks that the files exist, so a half-written file of a killed job would break every later one. Here
an index is built in a private directory, synced and renamed into place; the record of its hashes is written last. An
index that does not match its record is rebuilt and replaced, without disturbing other jobs that use it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from trainer.contract.errors import TrainerError
from trainer.contract.files.hashing import file_sha256, num_threads
from trainer.contract.files.regular_file import open_regular, read_text
from trainer.contract.files.system_calls import sync_path, try_lock
from trainer.contract.problem import Problem
from trainer.contract.resuming.provenance import identify
from trainer.contract.wording import counted

LogLine = Callable[[str], None]
"""Function that logs one line."""

FORMAT = 1
"""Format of the record. Changes if the same key would result in different indices."""

LINE_INTERVAL_S = 10
"""Interval between log lines during a build (seconds)."""

_PRIVATE = ".building-"


@dataclass(frozen=True)
class Index:
    """An index: a few files that are determined by a key, one .idx file and its loss mask."""

    title: str
    """Name in the log."""
    key: str
    """Prefix of the names of its files."""
    suffixes: tuple[str, ...]
    """Suffixes of the names of its files."""
    source: Path | None
    """The .idx file that it is made from; None if it only depends on the key."""
    build: Callable[[Path], object]
    """Function that writes the files to a directory."""
    mask: Path | None = None
    """The loss mask that it is made from; None if it does not depend on one."""

    @property
    def names(self) -> list[str]:
        """Names of its files."""
        return [f"{self.key}-{suffix}" for suffix in self.suffixes]

    @property
    def record(self) -> str:
        """Name of its record."""
        return f"{self.key}-record.json"


def complete(indices: Sequence[Index], directory: Path, log: LogLine) -> None:
    """Make every index in `directory` valid: check all bytes of existing ones, and build the others.

    Raises:
        OSError: the directory cannot be written. Indices that are complete by then are kept.
        TrainerError: an .idx file changed during the build.
    """
    indices = list({index.key: index for index in indices}.values())
    directory.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory)
    started = time.monotonic()
    with ThreadPoolExecutor(num_threads()) as threads:
        faults = list(threads.map(lambda index: _fault_in_bytes(index, directory), indices))
    # Not in the threads: numpy parses the header of a file as Python, which Python 3.11 cannot do in two threads at
    # once (SystemError: AST constructor recursion depth mismatch).
    faults = [
        problem or _fault_in_content(index, directory) for index, problem in zip(indices, faults, strict=True)
    ]
    valid = [index for index, problem in zip(indices, faults, strict=True) if problem is None]
    if valid:
        seconds, size = time.monotonic() - started, _size(valid, directory)
        log(
            f"data: {len(valid)} of {_counted(indices)} in {directory} already valid: "
            f"{size / 1e9:,.2f} GB read in {seconds:.1f} s"
        )
    for problem in faults:
        if problem and not problem.is_missing:
            log(f"data: warning: {problem.sentence}. Building it again")
    if missing := [index for index, problem in zip(indices, faults, strict=True) if problem]:
        _build_all(missing, directory, log)


def _fault_in_bytes(index: Index, directory: Path) -> Problem | None:
    """Why an index cannot be used; None if its files are as its record says. Reads them and the .idx file."""
    title = f"the index for {index.title}"
    try:
        record = _read_record(directory / index.record)
    except FileNotFoundError:
        if any((directory / name).exists() for name in index.names):
            return Problem(title, "has no record, so it may be incomplete")
        return Problem(title, "is missing", is_missing=True)
    if record is None:
        return Problem(title, "has a record that cannot be read")
    if index.source is not None and not _same_content(identify(index.source), record["source"]):
        return Problem(title, f"was made from another version of {index.source}")
    if index.mask is not None and not _same_content(identify(index.mask), record.get("mask")):
        return Problem(title, f"was made from another version of {index.mask}")
    for name in index.names:
        try:
            identity = _identity(directory / name)
        except FileNotFoundError:
            return Problem(title, f"lacks its file {name}")
        if identity != record["files"].get(name):
            return Problem(title, f"is damaged: {name} was changed after it was written")
    return None


def _fault_in_content(index: Index, directory: Path) -> Problem | None:
    """Why the recorded files of an index cannot be used; None if they can."""
    for name in index.names:
        if name.endswith(".npy") and not _is_of_numbers(directory / name):
            return Problem(
                f"the index for {index.title}", f"cannot be trusted: {name} is not an array of numbers"
            )
    return None


def _is_of_numbers(path: Path) -> bool:
    """True if an .npy file contains only numbers. Megatron-Core also loads pickled objects, which could run code."""
    try:
        return isinstance(numpy.load(path, mmap_mode="r", allow_pickle=False), numpy.ndarray)
    except (ValueError, EOFError):
        return False


def _build_all(indices: Sequence[Index], directory: Path, log: LogLine) -> None:
    started = logged_at = time.monotonic()
    for number, index in enumerate(indices, start=1):
        _build(index, directory)
        now = time.monotonic()
        if now - logged_at >= LINE_INTERVAL_S and number < len(indices):
            logged_at = now
            left = (now - started) / number * (len(indices) - number)
            log(f"data: built index {number} of {len(indices)} ({index.title}), about {left:,.0f} s left")
    seconds, size = time.monotonic() - started, _size(indices, directory)
    log(f"data: built {_counted(indices)} in {directory}: {size / 1e9:,.2f} GB in {seconds:,.1f} s")


def _counted(indices: Sequence[Index]) -> str:
    return counted(len(indices), "index", "indices")


def _build(index: Index, directory: Path) -> None:
    sources = _identities(index)
    with _private_directory(directory) as private:
        index.build(private)
        files = {}
        for name in index.names:
            _sync(private / name)
            files[name] = _identity(private / name)
        for name, now in _identities(index).items():
            if now is not None and not _same_content(now, sources[name]):
                raise TrainerError(
                    f"{getattr(index, name)} changed while its index was built. Start the run again once the file no "
                    "longer changes"
                )
        record = private / index.record
        record.write_text(
            json.dumps({"format": FORMAT, **sources, "files": files}, indent=1), encoding="utf-8"
        )
        _sync(record)
        for name in index.names:
            (private / name).replace(directory / name)
        sync_path(directory)
        record.replace(directory / index.record)
        sync_path(directory)


def _identities(index: Index) -> dict[str, dict[str, Any] | None]:
    """The files that an index is made from, as in its record. Only the index of chats has a mask."""
    source = {"source": None if index.source is None else identify(index.source)}
    return source if index.mask is None else source | {"mask": identify(index.mask)}


def _read_record(path: Path) -> dict[str, Any] | None:
    """Read a record; None if it is invalid or has another format.

    Raises:
        FileNotFoundError: there is no record.
    """
    try:
        record = json.loads(read_text(path))
    except ValueError:
        return None
    is_record = isinstance(record, dict) and record.keys() - {"mask"} == {"format", "source", "files"}
    return record if is_record and record["format"] == FORMAT and isinstance(record["files"], dict) else None


def _same_content(one: dict[str, Any], other: Any) -> bool:
    """True if two identities have the same content. Their modification times may differ."""
    return isinstance(other, dict) and all(one[name] == other.get(name) for name in ("size", "sha256"))


def _identity(path: Path) -> dict[str, Any]:
    digest, size = file_sha256(path)
    return {"size": size, "sha256": digest}


def _size(indices: Sequence[Index], directory: Path) -> int:
    return sum((directory / name).stat().st_size for index in indices for name in index.names)


def _sync(path: Path) -> None:
    with open_regular(path) as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _private_directory(directory: Path) -> Iterator[Path]:
    """A new private directory. It is removed at the end or, if this process is killed, by a later one."""
    while True:
        lock_file = directory / f"{_PRIVATE}{secrets.token_hex(8)}.lock"
        with lock_file.open("xb") as lock:
            # Another process may unlink the file before it is locked here. In that case, try again.
            if try_lock(lock) and not os.fstat(lock.fileno()).st_nlink:
                continue
            private = lock_file.with_suffix("")
            private.mkdir(mode=0o700)  # so that other users cannot put links into it
            try:
                yield private
            finally:
                shutil.rmtree(private, ignore_errors=True)
                lock_file.unlink(missing_ok=True)
            return


def _remove_leftovers(directory: Path) -> None:
    """Remove leftovers of killed builds. Without file locks, they stay, since running builds look the same."""
    for lock_file in directory.glob(f"{_PRIVATE}*.lock"):
        with contextlib.suppress(OSError), lock_file.open("rb+") as lock:
            if try_lock(lock):
                shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
                lock_file.unlink()
