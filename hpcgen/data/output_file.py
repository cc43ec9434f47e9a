"""Files of lines that are hashed and counted as they are written."""

from __future__ import annotations

import hashlib
from typing import BinaryIO

from hpcgen.data.record import FileIdentity


class OutputFile:
    """Appends to a private file. The last line needs no "\\n" to count."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._hash = hashlib.sha256()
        self._newlines = 0
        self.size = 0
        """Bytes written."""
        self.ends_line = True
        """Whether the next byte begins a line."""

    def write(self, data: bytes) -> int:
        """Appends `data`, and gives the number of line ends in it."""
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)
        newlines = data.count(b"\n")
        self._newlines += newlines
        if data:
            self.ends_line = data.endswith(b"\n")
        return newlines

    @property
    def num_lines(self) -> int:
        """Lines written."""
        return self._newlines + (not self.ends_line)

    def identity(self) -> FileIdentity:
        """What was written."""
        return FileIdentity(self._name, self.size, self._hash.hexdigest())
