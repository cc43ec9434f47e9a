"""The metrics of a run that goes on right now, as far as they are this life's own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Followed:
    """Reads a metrics.jsonl on from where it was last read.

    Lines before the `start` line of an attempt that began after `since` (seconds since 1970) belong to another one: to
    an earlier attempt, or to another command that trains in the same directory.
    """

    def __init__(self, path: Path, since: float) -> None:
        self._path = path
        self._since = since
        self._inode = 0
        self._offset = 0
        self._is_own = False
        self._last: dict[str, Any] = {}

    def last_step(self) -> dict[str, Any]:
        """The last step of this attempt so far; empty before the first."""
        try:
            with self._path.open("rb") as file:
                self._reopen(os.fstat(file.fileno()))
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self._take(line)
        except FileNotFoundError:
            pass
        return self._last

    def _reopen(self, status: os.stat_result) -> None:
        """An attempt that goes on from a checkpoint writes the file anew, without what it computes again."""
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset, self._is_own, self._last = status.st_ino, 0, False, {}

    def _take(self, line: bytes) -> None:
        if not self._is_own and b'"start"' not in line:
            return  # a long run's file has many
        try:
            entry = json.loads(line)
        except ValueError:
            return
        if not isinstance(entry, dict):
            return
        if entry.get("event") == "start":
            self._is_own = entry.get("time", 0) >= self._since
        elif self._is_own and entry.get("event") == "step":
            self._last = entry
