"""Files appear whole or not at all: written under a private name beside the target, synced, then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from hpcgen.errors import HpcgenError

_PRIVATE_NAME = re.compile(r"\.(?P<target>.+)\.[0-9a-f]{16}\.tmp")


@contextlib.contextmanager
def private_file(target: Path, *, swept: bool = False) -> Iterator[BinaryIO]:
    """A new file beside `target` for `publish` to rename; gone at the end unless it was published.

    What killed runs left behind for the same target is removed first, unless it is `swept` already.

    Raises:
        OSError: the directory cannot be made or written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if not swept:
        sweep([target])
    file = _create(target)
    try:
        yield file
    finally:
        file.close()
        Path(file.name).unlink(missing_ok=True)


def sweep(targets: Iterable[Path]) -> None:
    """Removes what killed runs left behind for `targets`, with one look at each of their directories.

    A living writer holds a lock on its file, so two runs that write the same target do not disturb each other.
    On a file system without locks the leftovers stay. Nothing is removed for other targets: where locks
    are known to one node only, tasks on other nodes may be writing them.
    """
    names: defaultdict[Path, set[str]] = defaultdict(set)
    for target in targets:
        names[target.parent].add(target.name)
    for directory, wanted in names.items():
        for path in _private_files(directory, wanted):
            with contextlib.suppress(OSError), path.open("rb+") as file:
                if _lock(file):
                    path.unlink()


def sync(file: BinaryIO) -> None:
    """Brings everything written to `file` to the disk."""
    file.flush()
    os.fsync(file.fileno())


def publish(file: BinaryIO, target: Path) -> None:
    """Renames a file of `private_file(target)` to `target`, replacing what is there."""
    sync(file)
    Path(file.name).replace(target)
    sync_path(target.parent)


def sync_path(path: Path) -> None:
    """Brings a file, or the renames and removals in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(target: Path, text: str, mode: int) -> None:
    """Publishes a small text file with these permissions, less the umask.

    Raises:
        HpcgenError: it cannot be written.
    """
    try:
        with private_file(target) as file:
            file.write(text.encode())
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(file.fileno(), mode & ~umask)
            publish(file, target)
    except OSError as error:
        raise HpcgenError(f"{target}: cannot be written ({error.strerror})") from error


def write_output(target: Path, text: str, mode: int) -> None:
    """Writes what a user asked for to the place that they named, and makes no directory for it.

    A file is replaced whole, as `write_text` does it. A link stays and leads to the new file; a device or a pipe
    is written to.

    Raises:
        HpcgenError: the directory is missing, or it cannot be written.
    """
    require_directory(target)
    if not is_special(target):
        file = Path(os.path.realpath(target))
        if file.is_symlink():
            raise HpcgenError(f"{target}: cannot be written, its links lead in a ring")
        write_text(file, text, mode)
        return
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HpcgenError(f"{target}: cannot be written ({error.strerror})") from error


def require_directory(target: Path) -> None:
    """Refuses a file in a directory that is not there: it may be mistyped.

    Raises:
        HpcgenError: so it is, with the topmost directory that is missing.
    """
    folders = Path(os.path.realpath(target)).parents if target.is_symlink() else target.absolute().parents
    missing = [folder for folder in folders if not os.path.lexists(folder)]
    if missing:
        raise HpcgenError(f"{target}: cannot be written, {missing[-1]} is not there", "make it first")


def is_special(target: Path) -> bool:
    """Whether something else than a regular file is there: a device, a pipe, a directory. Links are followed."""
    # unlike Path's methods, these answer where it cannot be looked at as well
    return os.path.exists(target) and not os.path.isfile(target)  # noqa: PTH110, PTH113


def _create(target: Path) -> BinaryIO:
    while True:
        path = target.parent / f".{target.name}.{secrets.token_hex(8)}.tmp"
        file = path.open("xb")
        # Another run may sweep the file before it is locked: then it has no name any more, and we try again.
        if not _lock(file) or os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _private_files(directory: Path, targets: set[str]) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            found = [match for entry in entries if (match := _PRIVATE_NAME.fullmatch(entry.name))]
    except OSError:
        return []
    return [directory / match[0] for match in found if match["target"] in targets]


def _lock(file: BinaryIO) -> bool:
    """Whether the lock was free; False also where the file system knows no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
