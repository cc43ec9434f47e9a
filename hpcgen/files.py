"""Writing a file so that a reader sees the old one or the whole new one, whenever the machine stops."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from hpcgen.errors import HpcgenError


def write_text(path: Path, text: str, mode: int = 0o600) -> None:
    """Writes `path` through a temporary file beside it, synced and renamed.

    Raises:
        HpcgenError: the directory is not there or cannot be written to.
    """
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()
            raise
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise HpcgenError(f"{path}: cannot be written ({error.strerror})") from error
