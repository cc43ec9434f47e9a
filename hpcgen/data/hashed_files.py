"""Files that are hashed as they are read or written, so that every record names the content it was made of."""

from __future__ import annotations

import hashlib
import os
from io import FileIO
from types import TracebackType
from typing import Any, BinaryIO

from hpcgen.data.record import FileIdentity
from hpcgen.data.unit import Input
from hpcgen.errors import HpcgenError


class CheckedFile:
    """An input of a unit, to be read once from its begin to its end.

    Raises:
        HpcgenError: on entering, it is not there, or of another size or time than it must be; on reading, it
            cannot be read; on `finish`, it holds something else than it must, or has changed meanwhile.
    """

    def __init__(self, item: Input) -> None:
        self.path = item.path
        self._wanted = item.identity()
        self._made_by = item.name.partition("/")[0] if item.made_by else None
        self._hash = hashlib.sha256()
        self._size = 0

    def __enter__(self) -> CheckedFile:
        try:
            self._file = FileIO(self.path)
        except OSError as error:
            raise HpcgenError(f"cannot read {self.path}: {error.strerror}") from error
        try:
            self._status = os.fstat(self._file.fileno())
            self._compare("size", self._wanted.size, self._status.st_size)
            if self._wanted.sha256 is None:
                self._compare("time of change (ns)", self._wanted.modified_ns, self._status.st_mtime_ns)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        """At most `size` bytes, none at the end."""
        try:
            data = self._file.read(size) or b""
        except OSError as error:
            raise HpcgenError(f"cannot read {self.path}: {error.strerror}") from error
        self._hash.update(data)
        self._size += len(data)
        return data

    def tell(self) -> int:
        """Bytes read so far."""
        return self._size

    def finish(self) -> FileIdentity:
        """What was read, once it is known to be what it must be."""
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._status.st_size, self._status.st_mtime_ns) or (
            self._size != now.st_size
        ):
            raise HpcgenError(f"{self.path}: changed while it was read", "run it again")
        digest = self._hash.hexdigest()
        self._compare("SHA-256", self._wanted.sha256, digest)
        return FileIdentity(self._wanted.name, self._size, digest, self._wanted.modified_ns)

    def _compare(self, what: str, wanted: object, found: object) -> None:
        if wanted not in (None, found):
            made_by = self._made_by
            since = "made" if made_by else "planned"
            message = f"{self.path}: changed since it was {since}: its {what} is {found}, not {wanted}"
            if made_by is None:
                raise HpcgenError(message, "run hpcgen data plan again")
            # what keeps its length and its time is done for all who do not read it
            first = "remove it and " if what == "SHA-256" else ""
            raise HpcgenError(message, f"{first}run the stage {made_by} again")


class HashedFile:
    """Appends to a private file; `name` is what the record calls it."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file = file
        self.size = 0
        """Bytes written."""
        self._name = name
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> Any:
        """Appends the bytes of `data`."""
        self.file.write(data)
        self._hash.update(data)
        self.size += memoryview(data).nbytes

    def identity(self) -> FileIdentity:
        """What was written."""
        return FileIdentity(self._name, self.size, self._hash.hexdigest())


class OutputFile(HashedFile):
    """The same of lines, which are counted. The last line needs no "\\n" to count."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__(file, name)
        self._newlines = 0
        self.ends_line = True
        """Whether the next byte begins a line."""

    def write(self, data: bytes) -> int:
        """Appends `data`, and gives the number of line ends in it."""
        super().write(data)
        newlines = data.count(b"\n")
        self._newlines += newlines
        if data:
            self.ends_line = data.endswith(b"\n")
        return newlines

    @property
    def num_lines(self) -> int:
        """Lines written."""
        return self._newlines + (not self.ends_line)
