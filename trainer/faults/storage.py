"""Failures of the storage: whether a retry may help, and how they are reported."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trainer.contract.errors import Scope, TrainerError
from trainer.distributed.groups import from_rank_0

T = TypeVar("T")

FINAL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ELOOP)
"""Somebody must fix these first. Another attempt would train up to the next save, and fail in the same way."""


def allows_retry(error: BaseException) -> bool:
    """Whether the same operation may succeed later."""
    return not (isinstance(error, OSError) and (error.errno in FINAL_ERRORS or _is_short_write(error)))


def _is_short_write(error: OSError) -> bool:
    """Whether numpy reports a full disk: its error says how much was written, without an errno."""
    return error.errno is None


def reason(error: OSError, path: Path | str = "storage") -> str:
    """Which file, what and its number; `path` is named where the error names none."""
    return f"{error.filename or path}: {error.strerror or error} (errno {error.errno})"


def storage_error(
    error: OSError, path: Path, operation: str = "read", scope: Scope = Scope.ONE_RANK
) -> TrainerError:
    """The error that reports a failure of the storage, which says nothing about a checkpoint.

    `operation` is a participle, as in "cannot be read"; `path` is named where `error` names no file.
    """
    full = ": is the disk full?" if _is_short_write(error) else ""
    return TrainerError(
        f"{error.filename or path} cannot be {operation} ({error.strerror or error}{full})",
        scope=scope,
        retry=allows_retry(error),
    )


def at_rank_0(function: Callable[[], T], path: Path, operation: str = "read") -> T:
    """`from_rank_0` for a function that reads or writes files below `path`.

    Raises:
        TrainerError: on all ranks, in place of an OSError.
    """

    def reporting() -> T:
        try:
            return function()
        except OSError as error:
            raise storage_error(error, path, operation) from error

    return from_rank_0(reporting)
