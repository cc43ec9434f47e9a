"""The index files of Megatron-Core's datasets: published whole, recorded, and checked before anything maps them.

Core itself only looks whether the files exist, so what a killed job left half-written would poison every later one.
Here an index is built in a private directory, synced and renamed into place, and the record of its hashes comes last.
Nothing is trusted but what agrees with its record, so nothing need be removed: what does not agree is built again
and renamed over, which disturbs no other job that reads or builds the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy

from trainer.contract.errors import TrainerError
from trainer.contract.provenance import identify
from trainer.contract.run_directory import sync_directory
from trainer.contract.wording import counted
from trainer.data.blend import Say

FORMAT = 1
"""Changes when the same key would give other indices than before."""

MAX_THREADS = 16
"""That hash at once."""

LINE_INTERVAL_S = 10
"""Between lines about a build that goes on."""

_CHUNK = 2**23
_PRIVATE = ".building-"
_NOT_THERE = "is not there"


@dataclass(frozen=True)
class Index:
    """What Core keeps under one key: a few files, which follow from the key and one .idx file."""

    title: str
    """Names it in the log."""
    key: str
    """What the names of its files begin with."""
    suffixes: tuple[str, ...]
    """What they end with."""
    source: Path | None
    """The .idx file that it is made of; None where the key says all."""
    build: Callable[[Path], object]
    """Makes the files in a directory."""

    @property
    def names(self) -> list[str]:
        """The names of its files."""
        return [f"{self.key}-{suffix}" for suffix in self.suffixes]

    @property
    def record(self) -> str:
        """The name of its record."""
        return f"{self.key}-record.json"


def complete(indices: Sequence[Index], directory: Path, say: Say) -> None:
    """Leaves every index whole in `directory`: checks the bytes of those that are there, and builds the others.

    Raises:
        OSError: the directory cannot be written. What is published by then stays.
        TrainerError: an .idx file changed meanwhile.
    """
    indices = list({index.key: index for index in indices}.values())
    directory.mkdir(parents=True, exist_ok=True)
    _sweep(directory)
    started = time.monotonic()
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:
        faults = list(threads.map(lambda index: fault(index, directory), indices))
    good = [index for index, reason in zip(indices, faults, strict=True) if reason is None]
    if good:
        seconds, size = time.monotonic() - started, _size(good, directory)
        say(
            f"data: {len(good)} of {_counted(indices)} in {directory} there and as recorded: "
            f"{size / 1e9:,.2f} GB read in {seconds:.1f} s"
        )
    missing = [(index, reason) for index, reason in zip(indices, faults, strict=True) if reason is not None]
    for index, reason in missing:
        if reason != _NOT_THERE:
            say(f"data: warning: the index for {index.title} {reason}: building it again")
    if missing:
        _build_all([index for index, _ in missing], directory, say)


def fault(index: Index, directory: Path) -> str | None:
    """Why the index in `directory` cannot be used, in words that follow its name; None when it can.

    Reads all of its files, and the .idx file where that is not as old or as large as it was.
    """
    try:
        record = _read_record(directory / index.record)
    except FileNotFoundError:
        if any((directory / name).exists() for name in index.names):
            return "has no record, so whoever wrote it may not have finished"
        return _NOT_THERE
    if record is None:
        return "has a record that cannot be read"
    if index.source is not None and not _same(identify(index.source, record["source"]), record["source"]):
        return f"was made of another {index.source}"
    for name in index.names:
        try:
            identity = _identity(directory / name)
        except FileNotFoundError:
            return f"lacks its file {name}"
        if identity != record["files"].get(name):
            return f"is damaged: {name} is not what was written"
        if name.endswith(".npy") and not _is_of_numbers(directory / name):
            return f"cannot be trusted: {name} is not an array of numbers"
    return None


def _is_of_numbers(path: Path) -> bool:
    """Whether an .npy file holds numbers alone. Megatron-Core also loads pickled objects, which could run code."""
    try:
        return isinstance(numpy.load(path, mmap_mode="r", allow_pickle=False), numpy.ndarray)
    except (ValueError, EOFError):
        return False


def _build_all(indices: Sequence[Index], directory: Path, say: Say) -> None:
    started = said = time.monotonic()
    for number, index in enumerate(indices, start=1):
        _build(index, directory)
        now = time.monotonic()
        if now - said >= LINE_INTERVAL_S and number < len(indices):
            said = now
            left = (now - started) / number * (len(indices) - number)
            say(f"data: built index {number} of {len(indices)} ({index.title}), about {left:,.0f} s left")
    seconds, size = time.monotonic() - started, _size(indices, directory)
    say(f"data: built {_counted(indices)} in {directory}: {size / 1e9:,.2f} GB in {seconds:,.1f} s")


def _counted(indices: Sequence[Index]) -> str:
    return counted(len(indices), "index", "indices")


def _build(index: Index, directory: Path) -> None:
    source = index.source and identify(index.source)
    with _private_directory(directory) as private:
        index.build(private)
        files = {}
        for name in index.names:
            _sync(private / name)
            files[name] = _identity(private / name)
        if index.source is not None and not _same(identify(index.source, source), source):
            raise TrainerError(
                f"{index.source} changed while its index was built; start again when it is at rest"
            )
        record = private / index.record
        record.write_text(
            json.dumps({"format": FORMAT, "source": source, "files": files}, indent=1), encoding="utf-8"
        )
        _sync(record)
        for name in index.names:
            (private / name).replace(directory / name)
        sync_directory(directory)
        record.replace(directory / index.record)
        sync_directory(directory)


def _read_record(path: Path) -> dict[str, Any] | None:
    """The record, or None when it is none of this version.

    Raises:
        FileNotFoundError: there is none.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    is_ours = isinstance(record, dict) and record.keys() == {"format", "source", "files"}
    return record if is_ours and record["format"] == FORMAT and isinstance(record["files"], dict) else None


def _same(one: dict[str, Any], other: Any) -> bool:
    """Whether two identities are of the same content, copied or touched meanwhile as it may be."""
    return isinstance(other, dict) and all(one[name] == other.get(name) for name in ("size", "sha256"))


def _identity(path: Path) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"size": size, "sha256": digest.hexdigest()}


def _size(indices: Sequence[Index], directory: Path) -> int:
    return sum((directory / name).stat().st_size for index in indices for name in index.names)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _private_directory(directory: Path) -> Iterator[Path]:
    """A new directory that no other process knows; gone at the end, or swept when this process is killed."""
    while True:
        lock_file = directory / f"{_PRIVATE}{secrets.token_hex(8)}.lock"
        with lock_file.open("xb") as lock:
            # Another process may sweep the file before it is locked: then it has no name any more, and we try again.
            if _lock(lock) and not os.fstat(lock.fileno()).st_nlink:
                continue
            private = lock_file.with_suffix("")
            private.mkdir(mode=0o700)  # nobody else puts links into it
            try:
                yield private
            finally:
                shutil.rmtree(private, ignore_errors=True)
                lock_file.unlink(missing_ok=True)
            return


def _sweep(directory: Path) -> None:
    """Removes what killed builds left; where the file system knows no locks, it stays."""
    for lock_file in directory.glob(f"{_PRIVATE}*.lock"):
        with contextlib.suppress(OSError), lock_file.open("rb+") as lock:
            if _lock(lock):
                shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
                lock_file.unlink()


def _lock(file: BinaryIO) -> bool:
    """Whether the lock was free; False also where the file system knows no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
