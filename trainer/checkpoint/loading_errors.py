"""Distinguishes why a checkpoint could not be loaded: its content, the machine, or code that a file names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from trainer.checkpoint import unpickling
from trainer.contract.errors import Scope, TrainerError
from trainer.distributed.groups import is_transport_error
from trainer.faults import storage
from trainer.faults.machine_failures import is_gpu_failure, is_out_of_memory


def raise_environment_fault(error: BaseException, path: Path) -> None:
    """Raise the cause of a loading error, if the cause is not the content of the checkpoint `path`.

    Raises:
        TrainerError: the storage failed, which may be temporary; or a file names code, which was not run.
        RuntimeError: the original error, if another rank is gone or the memory is full.
    """
    refuse_code(error, path)
    causes = list(_causes(error))
    for cause in causes:
        if is_out_of_memory(cause) or is_gpu_failure(cause) or _is_lost_connection(cause):
            raise cause
    for cause in causes:
        if isinstance(cause, OSError):
            raise storage.storage_error(cause, path, scope=scope_of(error)) from error


def refuse_code(error: BaseException, path: Path) -> None:
    """Raise a TrainerError for an error of loading the checkpoint `path`, if the cause is a file that names code."""
    for cause in _causes(error):
        if reason := unpickling.forbidden(cause):
            raise TrainerError(
                f"{reason}. The code was not run. Do not load this checkpoint; find out who wrote its files",
                where=path,
                scope=scope_of(error),
            ) from error


def scope_of(error: BaseException) -> Scope:
    """The ranks that raise a loading error. torch raises CheckpointException on all of them."""
    return Scope.ALL_RANKS if isinstance(error, CheckpointException) else Scope.ONE_RANK


def _is_lost_connection(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and is_transport_error(error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, its causes, and the errors of all ranks in a CheckpointException."""
    yield error
    if isinstance(error, CheckpointException):
        for failure, _ in error.failures.values():
            yield from _causes(failure)
    if error.__cause__ is not None:
        yield from _causes(error.__cause__)
