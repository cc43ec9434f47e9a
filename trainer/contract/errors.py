"""What ends a run on purpose: one line for the log, and an exit status that a batch script can read."""

from __future__ import annotations

import enum


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


class TrainerError(Exception):
    """The run cannot start or go on as it is; the message says why and what to do."""

    exit_code = Exit.REFUSED

    is_final = True
    """Starting again would give the same: the reason is left in the run directory as FAILED."""

    is_everywhere = False
    """Every rank raises it, so that rank 0 alone reports it."""

    is_announced = False
    """Its line is in the log, and the reason in the run directory."""


class RunDirectoryBusyError(TrainerError):
    """Another process trains in the run directory, whose marks are not this process's to set."""

    exit_code = Exit.FAULT
    is_final = False


class NonFiniteError(TrainerError):
    """The loss, the gradient norm or what a checkpoint would hold is not finite."""

    exit_code = Exit.NOT_FINITE
    is_everywhere = True


class LostPeersError(TrainerError):
    """Another rank is gone or cannot be reached; on other nodes, or once it is back, the run goes on."""

    exit_code = Exit.LOST_PEERS
    is_final = False


class NotSavedError(TrainerError):
    """A checkpoint could not be written; older ones are as they were.

    `is_final` says whether another try would fail as well, as on a full disk.
    """

    exit_code = Exit.NOT_SAVED

    def __init__(self, message: str, *, is_final: bool = True) -> None:
        super().__init__(message)
        self.is_final = is_final
