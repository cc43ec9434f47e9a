"""Atomic writing of files, with permissions according to `share` in the run file.

A file is written under a private name next to its target, synced, and renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from hpcgen.errors import HpcgenError
from trainer.contract.files.shared_files import refuse_foreign_link, user
from trainer.contract.files.system_calls import sync_path, try_lock

_PRIVATE_NAME = re.compile(r"\.(?P<target>.+)\.(?P<host>[0-9a-f]{8})[0-9a-f]{8}\.tmp")
_IDLE_S = 86400.0
"""A private file that has not been written for a day is considered abandoned, even if its lock cannot be checked."""


Share = Literal["private", "group"]


class Access(NamedTuple):
    """The permissions for a value of `share`."""

    umask: int
    directory_mode: int


ACCESS: dict[Share, Access] = {
    "private": Access(umask=0o077, directory_mode=0o700),
    # setgid: new entries get the directory's group, not the creating user's primary group
    "group": Access(umask=0o007, directory_mode=0o2770),
}


@contextlib.contextmanager
def shared_as(share: Share) -> Iterator[None]:
    """Sets the umask for `share`, in this process and in processes started within the context."""
    before = os.umask(ACCESS[share].umask)
    try:
        yield
    finally:
        os.umask(before)


def shared_as_directory(directory: Path) -> AbstractContextManager[None]:
    """Sets the umask of `share: group` if the directory is one that a group shares."""
    shares = stat.S_ISGID | stat.S_IWGRP
    try:
        is_shared = directory.stat().st_mode & shares == shares
    except OSError:  # whoever writes there reports it
        is_shared = False
    return shared_as("group") if is_shared else contextlib.nullcontext()


def make_directory(directory: Path, share: Share) -> None:
    """Creates a directory with the mode for `share`. An existing directory keeps its mode.

    Raises:
        HpcgenError: the directory cannot be created.
    """
    with shared_as(share):
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir()
            directory.chmod(ACCESS[share].directory_mode)
        except FileExistsError:
            return
        except OSError as error:
            raise HpcgenError(f"cannot be created ({error.strerror})", where=directory) from error


@contextlib.contextmanager
def private_file(target: Path, *, swept: bool = False) -> Iterator[BinaryIO]:
    """A new file next to `target` for `publish` to rename. It is removed at the end unless it was published.

    Files that killed processes left for the same target are removed first, unless `swept` is set.

    Raises:
        OSError: the directory cannot be created or written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if not swept:
        sweep([target])
    file = _create(target)
    try:
        yield file
    finally:
        try:
            file.close()  # fails again if the disk is full
        finally:
            Path(file.name).unlink(missing_ok=True)


def sweep(targets: Iterable[Path]) -> None:
    """Removes files that killed processes left for `targets`, reading each directory once.

    An active writer holds a lock on its file, so two runs that write the same target do not disturb each other. Some
    file systems have no locks, or only node-local ones. There, and for files written on other hosts, a file is
    considered abandoned if it has not been written for a day.
    """
    names: defaultdict[Path, set[str]] = defaultdict(set)
    for target in targets:
        names[target.parent].add(target.name)
    for directory, wanted in names.items():
        for path, host in _private_files(directory, wanted):
            if is_abandoned(path, host):
                path.unlink(missing_ok=True)


def is_abandoned(path: Path, host: str) -> bool:
    """Returns True if the writer of a private file on `host` (a `host_tag`) is gone.

    On this host, the file's lock decides, provided that locks are supported. Otherwise the modification time decides.
    """
    try:
        with path.open("rb+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock_decides = host == host_tag()
            except BlockingIOError:
                return False
            except OSError:  # the file system has no locks
                lock_decides = False
            return lock_decides or time.time() - os.fstat(file.fileno()).st_mtime > _IDLE_S
    except OSError:
        return False


def host_tag() -> str:
    """Eight-character identifier of this host, for the names of private files."""
    import socket  # lazy: hpcgen.config imports this module and never needs it

    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def sync(file: BinaryIO) -> None:
    """Flushes everything written to `file` to the disk."""
    file.flush()
    os.fsync(file.fileno())


def publish(file: BinaryIO, target: Path) -> None:
    """Renames a file of `private_file(target)` to `target`, replacing an existing file."""
    sync(file)
    Path(file.name).replace(target)
    sync_path(target.parent)


def require_writable(target: Path) -> None:
    """Refuses a write-protected file, which a rename would replace nevertheless. It may not exist.

    Even root does not replace a file that nobody may write to.

    Raises:
        HpcgenError: the file is write-protected.
    """
    file = Path(os.path.realpath(target))
    try:
        mode = file.stat().st_mode
    except OSError:  # nothing to protect, or whoever writes there reports it
        return
    is_writable = mode & 0o222 and os.access(file, os.W_OK)
    if not is_writable and os.access(file.parent, os.W_OK):
        command = f"chmod u+w {file}"
        raise HpcgenError(
            "is write-protected", _by_owner(file, f"to replace it, run {command}", "for access"), where=target
        )


def write_text(target: Path, text: str, mode: int) -> None:
    """Publishes a small text file with permissions `mode`, reduced by the umask.

    Raises:
        HpcgenError: the file is write-protected, or cannot be written.
    """
    require_writable(target)
    try:
        with private_file(target) as file:
            file.write(text.encode())
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(file.fileno(), mode & ~umask)
            publish(file, target)
    except OSError as error:
        raise HpcgenError(f"cannot be written ({error.strerror})", where=target) from error


def replace_text(target: Path, text: str) -> None:
    """Replaces the text of an existing file atomically. It keeps its mode, and its owner and group if this user may set
    them.

    Raises:
        HpcgenError: the file is a link of another user, is write-protected, or cannot be written.
    """
    require_writable(target)
    try:
        refuse_foreign_link(target, target.parent)
        file = Path(os.path.realpath(target))
        before = file.stat()
        with private_file(file) as new:
            new.write(text.encode())
            with contextlib.suppress(PermissionError):
                os.fchown(new.fileno(), before.st_uid, before.st_gid)
            os.fchmod(new.fileno(), stat.S_IMODE(before.st_mode))
            publish(new, file)
    except OSError as error:
        raise HpcgenError(f"cannot be written ({error.strerror})", where=target) from error


def write_output(target: Path, text: str, mode: int) -> None:
    """Writes an output to the path that the user named, without creating its directory.

    A regular file is replaced atomically. A symbolic link of this user is kept, and its target is replaced. Devices and
    pipes are written directly.

    Raises:
        HpcgenError: the directory does not exist, the path is a link of another user, or the file is write-protected or
            cannot be written.
    """
    require_target(target)
    if not is_special(target):
        write_text(Path(os.path.realpath(target)), text, mode)
        return
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HpcgenError(f"cannot be written ({error.strerror})", where=target) from error


def require_target(target: Path) -> None:
    """Refuses a path that `write_output` could not write, before the work whose result it gets.

    Raises:
        HpcgenError: see `write_output`.
    """
    require_directory(target)
    try:
        refuse_foreign_link(target, target.parent)
    except OSError as error:
        raise HpcgenError(f"{target} {error.strerror}") from error
    file = Path(os.path.realpath(target))
    if file.is_symlink():
        raise HpcgenError("cannot be written, because its symbolic links form a loop", where=target)
    if os.path.isdir(file):  # noqa: PTH112 (see `is_special`)
        raise HpcgenError("cannot be written, because it is a directory", "name a file in it", where=target)
    if is_special(target):
        return
    if not os.path.isdir(file.parent):  # noqa: PTH112
        raise HpcgenError(f"cannot be written, because {file.parent} is not a directory", where=target)
    if not os.access(file.parent, os.W_OK):
        raise HpcgenError(f"cannot be written (no permission to create files in {file.parent})", where=target)
    require_writable(file)


def require_directory(target: Path) -> None:
    """Refuses a file in a directory that does not exist, because the path may be mistyped.

    Raises:
        HpcgenError: a directory is missing. The message names the topmost one.
    """
    folders = Path(os.path.realpath(target)).parents if target.is_symlink() else target.absolute().parents
    missing = [folder for folder in folders if not os.path.lexists(folder)]
    if missing:
        raise HpcgenError(
            f"cannot be written, because {missing[-1]} does not exist", "create it first", where=target
        )


def without_access(error: PermissionError) -> str:
    """Message for a user without access to a path: the path, the directory that denies it, and its owner."""
    path = Path(os.fsdecode(error.filename)).absolute()
    # the topmost directory that cannot be searched, or else the path itself
    closed = next((place for place in reversed(path.parents) if not os.access(place, os.X_OK)), path)
    try:
        owner = user(closed.stat().st_uid)
    except OSError:
        return f"{path}: {error.strerror}"
    return f"{path}: {error.strerror}: ask {owner}, who owns {closed}, for access (share: group)"


def no_access(path: str | Path) -> str:
    """Why this user may not see whether the path exists; empty if nothing denies it."""
    try:
        Path(path).stat()
    except PermissionError as error:
        return without_access(error)
    except (OSError, ValueError):
        pass
    return ""


def to_read(directory: Path) -> str:
    """Hint for a directory that cannot be read."""
    return _by_owner(directory, f"chmod u+rx {directory}", "for access")


def to_protect(path: Path, mode: str) -> str:
    """Hint for a path that others can write to."""
    command = f"chmod {mode} {path}"
    return _by_owner(path, f"run {command}", f"to run {command}")


def _by_owner(path: Path, remedy: str, request: str) -> str:
    """The remedy, or the request to the owner of the path, who alone can change its mode."""
    owner = path.stat().st_uid
    return remedy if os.geteuid() in (0, owner) else f"ask {user(owner)}, who owns it, {request}"


def is_special(target: Path) -> bool:
    """Returns True if the path exists and is not a regular file but a device, pipe or directory. Follows links."""
    # unlike Path's methods, these do not raise if the path cannot be accessed
    return os.path.exists(target) and not os.path.isfile(target)  # noqa: PTH110, PTH113


def _create(target: Path) -> BinaryIO:
    while True:
        path = target.parent / f".{target.name}.{host_tag()}{os.urandom(4).hex()}.tmp"
        file = path.open("xb")
        # another process may remove the file before it is locked; then try again
        if not try_lock(file) or os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _private_files(directory: Path, targets: set[str]) -> list[tuple[Path, str]]:
    """The private files for `targets` in a directory, each with the host of its writer."""
    try:
        with os.scandir(directory) as entries:
            found = [match for entry in entries if (match := _PRIVATE_NAME.fullmatch(entry.name))]
    except OSError:
        return []
    return [(directory / match[0], match["host"]) for match in found if match["target"] in targets]
