"""Errors that end a run on purpose, with one line for the log and an exit status for the batch script."""

from __future__ import annotations

import copy
import enum
from typing import TypeVar

from trainer.contract.problem import Problem, as_place


class Exit(enum.IntEnum):
    """Exit statuses of the trainer. docs/faults.md says what to do about each."""

    DONE = 0
    """The last iteration is saved (DONE), or the run was asked to stop and has saved (STOPPED)."""
    FAULT = 1
    """A bug, with its traceback in the log, or a temporary failure such as storage that does not answer."""
    REFUSED = 2
    """The configuration, the data, the ranks or a checkpoint do not fit the run. Always final."""
    NOT_FINITE = 3
    """The loss, the gradient norm or a value to be saved is not finite."""
    HUNG = 4
    """No progress within the timeout; the stacks are in the run directory."""
    LOST_PEERS = 5
    """Another rank is gone or cannot be reached."""
    NOT_SAVED = 6
    """A checkpoint could not be written."""
    TERMINATED = 143
    """SIGTERM, when some ranks were missing or there was nothing to save."""


class Scope(enum.Enum):
    """The ranks that raise an error."""

    ONE_RANK = "one rank"
    """The rank reports the error itself; the other ranks notice that it is gone."""
    ALL_RANKS = "all ranks"
    """Every rank raises the error at the same point, and only rank 0 reports it."""


Self = TypeVar("Self", bound="TrainerError")


class TrainerError(Exception):
    """The run cannot start or continue; the message says why and what to do."""

    def __init__(
        self,
        *mistakes: str | Problem,
        where: object = "",
        scope: Scope = Scope.ONE_RANK,
        retry: bool = False,
        exit_code: Exit | None = None,
    ) -> None:
        """`where` is the place of the mistakes that are text: a path, a key with its value, or a rank."""
        self.mistakes: tuple[Problem, ...] = tuple(
            Problem("", each, where=as_place(where)) if isinstance(each, str) else each for each in mistakes
        )
        super().__init__("\n".join(map(str, self.mistakes)))
        self.scope = scope
        self.retry = retry
        """True if another attempt may succeed. Otherwise, the message is written to FAILED in the run directory."""
        self.exit_code = exit_code or (Exit.FAULT if retry else Exit.REFUSED)

    def on_all_ranks(self: Self) -> Self:
        """A copy of this error for every rank to raise."""
        raised = copy.copy(self)
        raised.scope = Scope.ALL_RANKS
        return raised


class RunDirectoryBusyError(TrainerError):
    """Another process is training in the run directory; its marker files must not be touched."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry=True)


class NonFiniteError(TrainerError):
    """The loss, the gradient norm or a value to be saved is not finite. Raised on all ranks."""

    def __init__(self, message: str) -> None:
        super().__init__(message, scope=Scope.ALL_RANKS, exit_code=Exit.NOT_FINITE)


class LostPeersError(TrainerError):
    """Another rank is gone or cannot be reached. Another attempt can continue the run."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry=True, exit_code=Exit.LOST_PEERS)


class NotSavedError(TrainerError):
    """A checkpoint could not be written. Older ones are unchanged. A full disk is not retried."""

    def __init__(self, message: str, *, scope: Scope = Scope.ONE_RANK, retry: bool = False) -> None:
        super().__init__(message, scope=scope, retry=retry, exit_code=Exit.NOT_SAVED)


class ReportedByRank0Error(Exception):
    """Rank 0 failed with an unexpected error, which it reports itself. Raised on the other ranks."""
