"""What the storage refused: whether starting again would help, and what to say of it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trainer.contract.errors import Exit, TrainerError
from trainer.distributed.groups import from_rank_0

T = TypeVar("T")

FINAL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ELOOP)
"""What somebody must mend first. Starting again would train up to the next save, and fail as this life did."""


def is_final(error: BaseException) -> bool:
    """Whether another try would be refused as well."""
    if not isinstance(error, OSError):
        return False
    return error.errno in FINAL_ERRORS or _is_short_write(error)


def _is_short_write(error: OSError) -> bool:
    """numpy says of a full disk how much it took, without a number."""
    return error.errno is None


def reason(error: OSError, path: Path | str = "storage") -> str:
    """Which file, what and its number; `path` is named where the error names none."""
    return f"{error.filename or path}: {error.strerror or error} (errno {error.errno})"


def refused(error: OSError, path: Path, be: str = "read") -> TrainerError:
    """A fault of the storage, which says nothing about a checkpoint, and may pass, unless it `is_final`."""
    full = ": is the disk full?" if _is_short_write(error) else ""
    raised = TrainerError(f"{error.filename or path} cannot be {be} ({error.strerror or error}{full})")
    raised.is_final = is_final(error)
    if not raised.is_final:
        raised.exit_code = Exit.FAULT
    return raised


def at_rank_0(function: Callable[[], T], path: Path, be: str = "read") -> T:
    """`from_rank_0` for what touches files below `path`.

    Raises:
        TrainerError: on all ranks, in place of an OSError.
    """

    def reporting() -> T:
        try:
            return function()
        except OSError as error:
            raise refused(error, path, be) from error

    return from_rank_0(reporting)
