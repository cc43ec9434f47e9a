"""Reads files that other users may have created, and refuses anything but a regular file.

Opening a FIFO waits for a writer, which may never come, and a device can be endless.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

from trainer.contract.errors import TrainerError

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


class IrregularFileError(TrainerError, OSError):
    """The path is not a regular file. Where no caller handles the OSError, it ends the run with one line."""

    def __init__(self, path: str | os.PathLike[str], mode: int) -> None:
        reason = f"it is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a regular file"
        super().__init__(f"{os.fspath(path)} cannot be used: {reason}. Move it away")
        self.errno, self.strerror, self.filename = errno.EINVAL, reason, os.fspath(path)

    def __str__(self) -> str:
        return str(self.args[0])


def open_regular(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """Opens a file for reading bytes, without ever waiting.

    Raises:
        IrregularFileError: the path is not a regular file.
        OSError: the file cannot be opened.
    """
    return open(path, "rb", buffering, opener=opener)  # the caller closes it


def opener(path: str, flags: int) -> int:
    """Opener for `open(opener=...)`.

    Raises:
        IrregularFileError: the path is not a regular file.
        OSError: the file cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a socket, a FIFO without a reader, a directory
            raise IrregularFileError(path, os.stat(path).st_mode) from error  # noqa: PTH116
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise IrregularFileError(path, mode)
    return descriptor


def require_regular(path: str | os.PathLike[str]) -> None:
    """Refuses what is not a regular file, for a library that opens the path itself.

    Raises:
        IrregularFileError: the path is not a regular file.
        OSError: the path does not exist, or cannot be opened.
    """
    os.close(opener(os.fspath(path), os.O_RDONLY))


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Reads a regular file.

    Raises:
        OSError: it is not one, or cannot be read.
    """
    with open_regular(path) as file:
        return file.read()


def read_text(path: str | os.PathLike[str], errors: str = "strict") -> str:
    """Reads a regular file as UTF-8.

    Raises:
        OSError: it is not one, or cannot be read.
        UnicodeDecodeError: it is not UTF-8, and `errors` is "strict".
    """
    with open(path, encoding="utf-8", errors=errors, opener=opener) as file:
        return file.read()
