"""Partially downloaded files: they survive kills and are never shared between two processes.

A part is `.NAME.<host><random>.part` next to its target and belongs to the process that created it. A new process
copies the part of a killed process instead of taking it over: on a file system with node-local locks, a lock may look
free although it is held, and two writers would corrupt the file. A `.part.json` next to a long part records how much of
the part is safely on disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from hpcgen.files import host_tag, is_abandoned, sync
from trainer.contract.files.regular_file import open_regular, read_bytes

SYNC_INTERVAL = 32 << 20
"""Bytes between two syncs of a part: the most that a kill can lose."""
HEAD_BYTES = 512
"""Number of leading bytes kept in memory."""
_BLOCK = 1 << 20
_NAME = re.compile(r"\.(?P<target>.+)\.(?P<host>[0-9a-f]{8})[0-9a-f]{8}\.part")


class _State(msgspec.Struct, frozen=True):
    """Content of .part.json."""

    origin: str
    """SHA-256 of the URL."""
    validator: str | None
    """ETag or Last-Modified of the content."""
    size: int
    """Bytes that are safely on disk."""
    total: int | None = None
    """Size of the complete content in bytes, if the server stated it."""


class PartialFile:
    """Beginning of a file that is being downloaded. Created by `partial_file`."""

    def __init__(self, target: Path, url: str) -> None:
        _leftover_parts(target.parent)  # must run before this process creates a part of its own
        self._target = target
        self._origin = hashlib.sha256(url.encode()).hexdigest()
        self._path, self.file = _create(target)
        """Open file; the caller renames it to the target when it publishes the file."""
        self._clear()

    def _clear(self) -> None:
        self.size = 0
        self.head = b""
        self.validator: str | None = None
        """Validator (ETag or Last-Modified) of the content; None if the server sends none."""
        self.total: int | None = None
        """Size of the complete content in bytes; None if the server has not stated it."""
        self._hash = hashlib.sha256()
        self._saved_size = 0

    @property
    def sha256(self) -> str:
        """SHA-256 of all bytes so far."""
        return self._hash.hexdigest()

    def write(self, block: bytes) -> None:
        """Appends a block.

        Raises:
            OSError: the disk is full or fails.
        """
        self.file.write(block)
        self._hash.update(block)
        if len(self.head) < HEAD_BYTES:
            self.head = (self.head + block)[:HEAD_BYTES]
        self.size += len(block)
        if self.size - self._saved_size >= SYNC_INTERVAL:
            self.save_state()

    def save_state(self) -> None:
        """Syncs the part to disk and records its size in .part.json."""
        sync(self.file)
        private = _new_state_path(self._path)
        private.unlink(missing_ok=True)  # left by a write that a full disk cut off
        with private.open("xb") as file:
            file.write(msgspec.json.encode(_State(self._origin, self.validator, self.size, self.total)))
        private.replace(_state_path(self._path))
        self._saved_size = self.size

    def restart(self) -> None:
        """Discards all content, because it belongs to another version of the file."""
        # First, because a process that copies the part reads the state last.
        _state_path(self._path).unlink(missing_ok=True)
        self.file.seek(0)
        self.file.truncate()
        self._clear()

    def copy_leftover(self) -> None:
        """Starts from the longest part of the same file that another process left."""
        others = _leftover_parts(self._target.parent).pop(self._target.name, [])
        states = [
            (path, state) for path in others if (state := _read_state(path)) and state.origin == self._origin
        ]
        for path, state in sorted(states, key=lambda entry: -entry[1].size):
            if self._copy(path, state):
                self.validator, self.total = state.validator, state.total
                self.save_state()
                break
            self.restart()
        _remember(self._target, [path for path in others if not _remove_abandoned(path)])

    def _copy(self, path: Path, state: _State) -> bool:
        """Copies the `state.size` bytes of the part at `path`. Returns False if they are no longer there."""
        left = state.size
        try:
            with open_regular(path) as file:
                while left and (block := file.read(min(_BLOCK, left))):
                    self.write(block)
                    left -= len(block)
        except FileNotFoundError:
            return False
        # The owner may still be running and may have restarted: then the state is gone or describes other content.
        now = _read_state(path)
        return not left and now is not None and now.validator == state.validator and now.size >= state.size

    def close(self, *, keep: bool) -> None:
        """Closes the part. With `keep`, it stays on disk for a later process; otherwise it is removed."""
        keep = keep and self.size > 0
        with contextlib.suppress(OSError):
            if keep:
                self.save_state()
            self.file.close()
        if keep:
            _remember(self._target, [self._path])
            return
        with contextlib.suppress(OSError):
            _remove(self._path)


@contextlib.contextmanager
def partial_file(target: Path, url: str) -> Iterator[PartialFile]:
    """Creates the part of `target`, starting with what an earlier process downloaded.

    The part is kept when an exception ends the download, unless the disk failed; otherwise it is removed. Parts of
    this file that dead processes left are removed as well.

    Raises:
        OSError: the directory cannot be created or written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = PartialFile(target, url)
    keep = True
    try:
        part.copy_leftover()
        yield part
        keep = False
    except OSError:
        keep = False  # on a full disk, the part would only take up space
        raise
    finally:
        part.close(keep=keep)


def _create(target: Path) -> tuple[Path, BinaryIO]:
    while True:
        path = target.with_name(f".{target.name}.{host_tag()}{secrets.token_hex(4)}.part")
        file = path.open("xb", buffering=_BLOCK)
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Before the lock was taken, another process may have removed the file as abandoned.
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()


@functools.cache
def _leftover_parts(directory: Path) -> dict[str, list[Path]]:
    """Parts that were in `directory` when this process first wrote there: target name -> parts.

    The directory is scanned only once, because it can hold as many files as a process downloads. Parts that other
    processes leave later are left to the next run. Abandoned parts of files that are already complete are removed.
    """
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries if entry.name.endswith(".part")]
    found: dict[str, list[Path]] = {}
    for name in names:
        path, match = directory / name, _NAME.fullmatch(name)
        if match and not ((directory / match["target"]).exists() and _remove_abandoned(path)):
            found.setdefault(match["target"], []).append(path)
    return found


def _remember(target: Path, parts: list[Path]) -> None:
    """Keeps `parts` of `target` for a later attempt of this process."""
    if parts:
        _leftover_parts(target.parent).setdefault(target.name, []).extend(parts)


def _remove_abandoned(part: Path) -> bool:
    """Removes a part if its owner is dead. Returns whether it was removed."""
    match = _NAME.fullmatch(part.name)
    if match is None or not is_abandoned(part, match["host"]):
        return False
    _remove(part)
    return True


def _remove(part: Path) -> None:
    for path in (_state_path(part), _new_state_path(part), part):
        path.unlink(missing_ok=True)


def _read_state(part: Path) -> _State | None:
    try:
        return msgspec.json.decode(read_bytes(_state_path(part)), type=_State)
    except (OSError, msgspec.MsgspecError):
        return None


def _state_path(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _new_state_path(part: Path) -> Path:
    return part.with_name(part.name + ".new")
