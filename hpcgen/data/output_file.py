"""Files that are hashed as they are written."""

from __future__ import annotations

import hashlib
from typing import Any, BinaryIO

from hpcgen.data.record import FileIdentity


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
