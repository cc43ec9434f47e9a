"""What ends a run on purpose: one line for the log, and an exit status that a batch script can read."""

from __future__ import annotations

import copy
import enum
from typing import TypeVar


class Exit(enum.IntEnum):
    """The trainer's exit statuses. docs/faults.md says what to do about each."""

    DONE = 0
    """The last iteration is saved (DONE), or the run was asked to stop and has saved (STOPPED)."""
    FAULT = 1
    """A bug, which leaves its traceback in the log, or a refusal that may pass: storage that does not answer."""
    REFUSED = 2
    """The configuration, the data, the ranks or a checkpoint are not what the run needs. Always final."""
    NOT_FINITE = 3
    """The loss, the gradient norm or what a checkpoint would hold is not finite."""
    HUNG = 4
    """Nothing moved for the timeout; the stacks are in the run directory."""
    LOST_PEERS = 5
    """Another rank is gone or cannot be reached."""
    NOT_SAVED = 6
    """A checkpoint could not be written."""
    TERMINATED = 143
    """SIGTERM, and not all ranks were there to save, or nothing was there to be saved."""


class Scope(enum.Enum):
    """The ranks that raise an error."""

    ONE_RANK = "one rank"
    """The rank reports the error itself; the others notice that it is gone."""
    ALL_RANKS = "all ranks"
    """Every rank raises the error at the same point, so that rank 0 alone reports it."""


Self = TypeVar("Self", bound="TrainerError")


class TrainerError(Exception):
    """The run cannot start or continue as it is; the message says why and what to do."""

    def __init__(
        self,
        message: str,
        *,
        scope: Scope = Scope.ONE_RANK,
        retry: bool = False,
        exit_code: Exit | None = None,
    ) -> None:
        super().__init__(message)
        self.scope = scope
        self.retry = retry
        """Starting again may succeed. Otherwise the message is left in the run directory as FAILED."""
        self.exit_code = exit_code or (Exit.FAULT if retry else Exit.REFUSED)

    def on_all_ranks(self: Self) -> Self:
        """A copy of this error for every rank to raise."""
        raised = copy.copy(self)
        raised.scope = Scope.ALL_RANKS
        return raised


class RunDirectoryBusyError(TrainerError):
    """Another process trains in the run directory, and its markers must stay."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry=True)


class NonFiniteError(TrainerError):
    """The loss, the gradient norm or what a checkpoint would hold is not finite; raised on all ranks."""

    def __init__(self, message: str) -> None:
        super().__init__(message, scope=Scope.ALL_RANKS, exit_code=Exit.NOT_FINITE)


class LostPeersError(TrainerError):
    """Another rank is gone or cannot be reached. On other nodes, or once it is back, the run continues."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry=True, exit_code=Exit.LOST_PEERS)


class NotSavedError(TrainerError):
    """A checkpoint could not be written; older ones are as they were. A full disk allows no retry."""

    def __init__(self, message: str, *, scope: Scope = Scope.ONE_RANK, retry: bool = False) -> None:
        super().__init__(message, scope=scope, retry=retry, exit_code=Exit.NOT_SAVED)


class ReportedByRank0Error(Exception):
    """Rank 0 has failed with an unexpected error, which it reports; raised on the other ranks."""
