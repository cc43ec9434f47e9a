"""Writing files: complete or not at all, and readable by those that `share` in the run file names.

A file is written under a private name next to its target, synced, then renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from hpcgen.errors import HpcgenError

_PRIVATE_NAME = re.compile(r"\.(?P<target>.+)\.(?P<host>[0-9a-f]{8})[0-9a-f]{8}\.tmp")
_IDLE_S = 86400.0
"""A private file that was not written for a day has no living writer, whatever locks can tell."""


Share = Literal["private", "group"]


class Access(NamedTuple):
    """The permissions that a value of `share` stands for."""

    umask: int
    file_mode: int
    directory_mode: int


ACCESS: dict[Share, Access] = {
    "private": Access(umask=0o077, file_mode=0o600, directory_mode=0o700),
    # setgid: entries get the directory's group, not the primary group of the user who makes them
    "group": Access(umask=0o007, file_mode=0o660, directory_mode=0o2770),
}


@contextlib.contextmanager
def shared_as(share: Share) -> Iterator[None]:
    """Sets the umask that `share` stands for, in this process and in those that it starts meanwhile."""
    before = os.umask(ACCESS[share].umask)
    try:
        yield
    finally:
        os.umask(before)


def make_directory(directory: Path, share: Share) -> None:
    """Makes a directory with the mode that `share` stands for; an existing one keeps its mode.

    Raises:
        HpcgenError: it cannot be made.
    """
    with shared_as(share):
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir()
            directory.chmod(ACCESS[share].directory_mode)
        except FileExistsError:
            return
        except OSError as error:
            raise HpcgenError(f"{directory}: cannot be made ({error.strerror})") from error


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
        try:
            file.close()  # on a full disk this fails once more
        finally:
            Path(file.name).unlink(missing_ok=True)


def sweep(targets: Iterable[Path]) -> None:
    """Removes what killed runs left behind for `targets`, with one look at each of their directories.

    A living writer holds a lock on its file, so two runs that write the same target do not disturb each other.
    Some file systems have no locks, or keep them to each node: there, and for files of other hosts everywhere, a
    writer counts as dead when it has not written for a day.
    """
    names: defaultdict[Path, set[str]] = defaultdict(set)
    for target in targets:
        names[target.parent].add(target.name)
    for directory, wanted in names.items():
        for path, host in _private_files(directory, wanted):
            if is_abandoned(path, host):
                path.unlink(missing_ok=True)


def is_abandoned(path: Path, host: str) -> bool:
    """Whether the writer of a private file, at work on `host` (of `host_tag`), is dead.

    On this host its lock says so, where there are locks; else time has to.
    """
    try:
        with path.open("rb+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock_tells = host == host_tag()
            except BlockingIOError:
                return False
            except OSError:  # no locks here
                lock_tells = False
            return lock_tells or time.time() - os.fstat(file.fileno()).st_mtime > _IDLE_S
    except OSError:
        return False


def host_tag() -> str:
    """Eight characters that stand for this host in names of private files."""
    import socket  # the configuration imports this module, and needs none of it

    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


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
        path = target.parent / f".{target.name}.{host_tag()}{os.urandom(4).hex()}.tmp"
        file = path.open("xb")
        # Another run may sweep the file before it is locked: then it has no name any more, and we try again.
        if not _lock(file) or os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _private_files(directory: Path, targets: set[str]) -> list[tuple[Path, str]]:
    """Those of `targets` in a directory, each with the host of its writer."""
    try:
        with os.scandir(directory) as entries:
            found = [match for entry in entries if (match := _PRIVATE_NAME.fullmatch(entry.name))]
    except OSError:
        return []
    return [(directory / match[0], match["host"]) for match in found if match["target"] in targets]


def _lock(file: BinaryIO) -> bool:
    """Whether the lock was free; False also where the file system knows no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
