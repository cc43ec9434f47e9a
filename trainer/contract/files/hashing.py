"""SHA-256 of content and of files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from trainer.contract.files.regular_file import open_regular

BLOCK = 4 * 2**20
"""Bytes per read of a file."""

MAX_THREADS = 16
"""Maximum number of threads that hash files. hashlib releases the GIL."""


def sha256(content: bytes) -> str:
    """SHA-256 of `content`, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def file_sha256(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> tuple[str, int]:
    """SHA-256 of a file, and its size. Calls `on_bytes` with the number of bytes of each read.

    Raises:
        OSError: the file cannot be read.
    """
    with open_regular(path, buffering=0) as file:
        return rest_sha256(file, on_bytes)


def rest_sha256(file: BinaryIO, on_bytes: Callable[[int], None] = lambda count: None) -> tuple[str, int]:
    """SHA-256 of an open file from its position to its end, and the number of bytes. See `file_sha256`."""
    digest, size = hashlib.sha256(), 0
    while block := file.read(BLOCK):
        digest.update(block)
        size += len(block)
        on_bytes(len(block))
    return digest.hexdigest(), size


def num_threads() -> int:
    """Number of threads that hash files at the same time: one for each core of this process, up to MAX_THREADS."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))
