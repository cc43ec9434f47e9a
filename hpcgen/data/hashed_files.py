"""Files that are hashed while they are read or written, so that every record identifies its inputs and outputs."""

from __future__ import annotations

import hashlib
import os
from io import FileIO
from types import TracebackType
from typing import Any, BinaryIO

from hpcgen.data.first_bytes import HEAD_BYTES, stand_in
from hpcgen.data.record import FileIdentity
from hpcgen.data.unit import Input
from hpcgen.errors import HpcgenError
from trainer.contract.files.regular_file import opener


class CheckedFile:
    """An input of a unit, to be read once from start to end.

    Raises:
        HpcgenError: on entering, if it is missing, has another size or modification time than expected, or is a web
            page or a pointer of git-lfs; on reading, if it is unreadable; on `finish`, if its content is not the
            expected one or has changed meanwhile.
    """

    def __init__(self, item: Input) -> None:
        self.path = item.path
        self._wanted = item.identity()
        self._made_by = item.maker.stage if item.maker else None
        self._hash = hashlib.sha256()
        self._size = 0

    def __enter__(self) -> CheckedFile:
        try:
            self._file = FileIO(self.path, opener=opener)
        except OSError as error:
            raise HpcgenError(f"cannot read {self.path}: {error.strerror}") from error
        try:
            self._status = os.fstat(self._file.fileno())
            self._compare("size", self._wanted.size, self._status.st_size)
            if self._wanted.sha256 is None:
                self._compare("modification time (ns)", self._wanted.modified_ns, self._status.st_mtime_ns)
            self._refuse_stand_in()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        """Returns at most `size` bytes; empty at the end of the file."""
        try:
            data = self._file.read(size) or b""
        except OSError as error:
            raise HpcgenError(f"cannot read {self.path}: {error.strerror}") from error
        self._hash.update(data)
        self._size += len(data)
        return data

    def tell(self) -> int:
        """Number of bytes read so far."""
        return self._size

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self._status.st_size

    def fileno(self) -> int:
        """Descriptor of the open file, for another process that reads without hashing."""
        return self._file.fileno()

    def finish(self) -> FileIdentity:
        """Checks the content that was read and returns its identity."""
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._status.st_size, self._status.st_mtime_ns) or (
            self._size != now.st_size
        ):
            raise HpcgenError(f"{self.path} changed while it was read", "run the stage again")
        digest = self._hash.hexdigest()
        self._compare("SHA-256", self._wanted.sha256, digest)
        return FileIdentity(self._wanted.name, self._size, digest, self._wanted.modified_ns)

    def _refuse_stand_in(self) -> None:
        if found := stand_in(os.pread(self._file.fileno(), HEAD_BYTES, 0)):
            content, hint = found
            raise HpcgenError(f"the content is {content}", hint, where=self.path)

    def _compare(self, what: str, wanted: object, found: object) -> None:
        if wanted not in (None, found):
            made_by = self._made_by
            since = "made" if made_by else "planned"
            message = f"{self.path} has changed since it was {since}: its {what} is {found}, not {wanted}"
            if made_by is None:
                raise HpcgenError(message, "run hpcgen data plan again")
            # A file with the recorded size and time counts as done. To make it again, remove it first.
            first = "remove it and " if what == "SHA-256" else ""
            raise HpcgenError(message, f"{first}run the stage {made_by} again")


class HashedFile:
    """Appends to a private file. `name` is its name in the record."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file = file
        self.size = 0
        """Number of bytes written."""
        self._name = name
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> Any:
        """Appends the bytes of `data`."""
        self.file.write(data)
        self._hash.update(data)
        self.size += memoryview(data).nbytes

    def identity(self) -> FileIdentity:
        """Identity of the content written so far."""
        return FileIdentity(self._name, self.size, self._hash.hexdigest())


class OutputFile(HashedFile):
    """A hashed file that counts its lines. The last line counts even without "\\n"."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__(file, name)
        self._newlines = 0
        self.ends_line = True
        """True if the next byte starts a new line."""

    def write(self, data: bytes) -> int:
        """Appends `data` and returns the number of line ends in it."""
        super().write(data)
        newlines = data.count(b"\n")
        self._newlines += newlines
        if data:
            self.ends_line = data.endswith(b"\n")
        return newlines

    @property
    def num_lines(self) -> int:
        """Number of lines written."""
        return self._newlines + (not self.ends_line)
