"""A new file that is hashed while it is written, so that a checkpoint's record has the hash of the intended bytes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

SYNC_EVERY = 2**30
"""Bytes between syncs of a file. A single sync at the end would look like hanging storage."""


class HashedFile:
    """Stream of bytes into a new file. Use it in a `with` block, which closes the file."""

    def __init__(self, path: Path) -> None:
        """Create the file.

        Raises:
            OSError: it exists, or cannot be created.
        """
        self.path, self.size, self._synced = path, 0, 0
        self._sha256 = hashlib.sha256()
        self._file = path.open("xb")
        self.error: OSError | None = None
        """First error of the storage. torch.save reports a RuntimeError in its place."""

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`. Returns its length."""
        try:
            self._file.write(data)
            if self.size - self._synced >= SYNC_EVERY:
                self._file.flush()
                os.fdatasync(self._file.fileno())
                self._synced = self.size
        except OSError as error:
            self.error = self.error or error
            raise
        self._sha256.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Pass buffered bytes to the operating system."""
        self._file.flush()

    def finish(self) -> dict[str, Any]:
        """Sync and close the file. Returns its entry in a checkpoint's record: size and SHA-256."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return {"bytes": self.size, "sha256": self._sha256.hexdigest()}
