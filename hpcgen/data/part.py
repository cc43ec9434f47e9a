"""What has been fetched of a file so far: kept over kills, and never shared between two processes.

A part is `.NAME.<host><random>.part` beside its target and belongs to the process that made it. What a killed process
left is copied, not taken over: a lock may seem free on a file system that keeps locks to each node, and two writers in
one file would spoil it. Beside a long part lies `.part.json`, which says how much of it is safely on the disk.
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

SYNC_INTERVAL = 32 << 20
"""Bytes after which a part is synced and noted: what a kill can cost at most."""
HEAD = 512
"""Bytes of the beginning that are kept in memory."""
_BLOCK = 1 << 20
_NAME = re.compile(r"\.(?P<target>.+)\.(?P<host>[0-9a-f]{8})[0-9a-f]{8}\.part")


class _Note(msgspec.Struct, frozen=True):
    """What stands in .part.json."""

    origin: str
    """Hash of the address."""
    validator: str | None
    """ETag or Last-Modified of the content."""
    size: int
    """Bytes that are on the disk."""
    total: int | None = None
    """Bytes of the complete content, where the server said."""


class PartialFile:
    """The beginning of a file that is being fetched. `partial_file` makes one."""

    def __init__(self, target: Path, url: str) -> None:
        _left_behind(target.parent)  # before there is a part of our own
        self._target = target
        self._origin = hashlib.sha256(url.encode()).hexdigest()
        self._path, self.file = _create(target)
        """Renamed to the target by whoever publishes it."""
        self._clear()

    def _clear(self) -> None:
        self.size = 0
        self.head = b""
        self.validator: str | None = None
        """Of the content that this is the beginning of; None where the server names none."""
        self.total: int | None = None
        """Bytes of the complete content as the server states them; None where it has not."""
        self._hash = hashlib.sha256()
        self._noted = 0

    @property
    def sha256(self) -> str:
        """Of all bytes so far."""
        return self._hash.hexdigest()

    def write(self, block: bytes) -> None:
        """Appends a block.

        Raises:
            OSError: the disk is full, or does not work.
        """
        self.file.write(block)
        self._hash.update(block)
        if len(self.head) < HEAD:
            self.head = (self.head + block)[:HEAD]
        self.size += len(block)
        if self.size - self._noted >= SYNC_INTERVAL:
            self.note()

    def note(self) -> None:
        """Brings what there is to the disk, and writes down that it is there."""
        sync(self.file)
        private = _new_note_path(self._path)
        private.unlink(missing_ok=True)  # of a note that a full disk cut off
        with private.open("xb") as note:
            note.write(msgspec.json.encode(_Note(self._origin, self.validator, self.size, self.total)))
        private.replace(_note_path(self._path))
        self._noted = self.size

    def restart(self) -> None:
        """Forgets everything: what there is belongs to another content."""
        _note_path(self._path).unlink(missing_ok=True)  # first: whoever copies the part looks for it last
        self.file.seek(0)
        self.file.truncate()
        self._clear()

    def copy_leftover(self) -> None:
        """Begins with the longest beginning of the same file that another process left."""
        others = _left_behind(self._target.parent).pop(self._target.name, [])
        notes = [(path, note) for path in others if (note := _read(path)) and note.origin == self._origin]
        for path, note in sorted(notes, key=lambda entry: -entry[1].size):
            if self._copy(path, note):
                self.validator, self.total = note.validator, note.total
                self.note()
                break
            self.restart()
        _remember(self._target, [path for path in others if not _remove_abandoned(path)])

    def _copy(self, path: Path, note: _Note) -> bool:
        """Whether what `note` says could be copied whole."""
        left = note.size
        try:
            with path.open("rb") as file:
                while left and (block := file.read(min(_BLOCK, left))):
                    self.write(block)
                    left -= len(block)
        except FileNotFoundError:
            return False
        # its owner may live and have started again meanwhile: then the note is gone, or tells of other content
        now = _read(path)
        return not left and now is not None and now.validator == note.validator and now.size >= note.size

    def close(self, *, keep: bool) -> None:
        """Ends the work on it; with `keep`, a later process finds it."""
        keep = keep and self.size > 0
        with contextlib.suppress(OSError):
            if keep:
                self.note()
            self.file.close()
        if keep:
            _remember(self._target, [self._path])
            return
        with contextlib.suppress(OSError):
            _remove(self._path)


@contextlib.contextmanager
def partial_file(target: Path, url: str) -> Iterator[PartialFile]:
    """The part of `target`, which begins with what an earlier process fetched.

    It is kept when an exception ends the work, unless the disk failed; else what is left of it goes. So does what
    dead processes left of this file.

    Raises:
        OSError: the directory cannot be made or written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = PartialFile(target, url)
    keep = True
    try:
        part.copy_leftover()
        yield part
        keep = False
    except OSError:
        keep = False  # a full disk is not helped by what stays on it
        raise
    finally:
        part.close(keep=keep)


def _create(target: Path) -> tuple[Path, BinaryIO]:
    while True:
        path = target.with_name(f".{target.name}.{host_tag()}{secrets.token_hex(4)}.part")
        file = path.open("xb", buffering=_BLOCK)
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Before it was locked, another process may have taken it for abandoned: then it has no name any more.
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()


@functools.cache
def _left_behind(directory: Path) -> dict[str, list[Path]]:
    """The parts that lay in a directory when this process first wrote there: name of the target -> parts.

    Looked for once: a folder may hold as many files as a process downloads. What other processes leave later is for
    the next run to go on with. Of files that are whole, nobody will go on with the parts of the dead: these go.
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
    """For a later attempt of this process."""
    if parts:
        _left_behind(target.parent).setdefault(target.name, []).extend(parts)


def _remove_abandoned(part: Path) -> bool:
    """Removes a part whose owner is dead; whether it was one."""
    match = _NAME.fullmatch(part.name)
    if match is None or not is_abandoned(part, match["host"]):
        return False
    _remove(part)
    return True


def _remove(part: Path) -> None:
    for path in (_note_path(part), _new_note_path(part), part):
        path.unlink(missing_ok=True)


def _read(part: Path) -> _Note | None:
    try:
        return msgspec.json.decode(_note_path(part).read_bytes(), type=_Note)
    except (OSError, msgspec.MsgspecError):
        return None


def _note_path(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _new_note_path(part: Path) -> Path:
    return part.with_name(part.name + ".new")
