"""Storage errors: how they are reported, and whether a retry may help."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trainer.contract.errors import Scope, TrainerError
from trainer.distributed.groups import from_rank_0

T = TypeVar("T")

FINAL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ELOOP)
"""Errors that a person must fix. Another attempt would train until the next save and fail in the same way."""


def allows_retry(error: BaseException) -> bool:
    """True if the same operation may succeed later."""
    return not (isinstance(error, OSError) and (error.errno in FINAL_ERRORS or _is_short_write(error)))


def _is_short_write(error: OSError) -> bool:
    """True if numpy reports a short write, as on a full disk. Its OSError has no errno."""
    return error.errno is None


def reason(error: OSError, path: Path | str = "storage") -> str:
    """File, error and errno as text. `path` is used if the error names no file."""
    return f"{error.filename or path}: {error.strerror or error} (errno {error.errno})"


def storage_error(
    error: OSError, path: Path, operation: str = "read", scope: Scope = Scope.ONE_RANK
) -> TrainerError:
    """The TrainerError that reports an OSError. It does not imply that a checkpoint is damaged.

    `operation` is a participle, as in "cannot be read". `path` is used if `error` names no file.
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
        TrainerError: on all ranks, instead of an OSError.
    """

    def reporting() -> T:
        try:
            return function()
        except OSError as error:
            raise storage_error(error, path, operation) from error

    return from_rank_0(reporting)
