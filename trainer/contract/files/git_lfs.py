"""Pointers of git-lfs: small texts in the place of large files that were not fetched."""

from __future__ import annotations

from pathlib import Path

from trainer.contract.files.regular_file import open_regular
from trainer.contract.problem import Problem

START = b"version https://git-lfs.github.com/spec/"
MAX_BYTES = 1024
"""Pointers are smaller, by their specification."""


def pointer_problem(path: Path) -> Problem | None:
    """The problem of a file that is a pointer. None if it is not, or cannot be read."""
    try:
        with open_regular(path) as file:
            is_pointer = file.read(len(START)) == START
    except OSError:
        return None
    reason = "is a pointer of git-lfs, not the file itself. Fetch it: git lfs pull"
    return Problem("", reason, subject=str(path)) if is_pointer else None
