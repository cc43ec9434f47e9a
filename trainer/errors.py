"""What ends a run on purpose: one line for the log, and an exit status that a batch script can read."""

from __future__ import annotations


class TrainerError(Exception):
    """The run cannot start or go on as it is; the message says why and what to do. Exit status 2.

    Starting again would give the same: the reason is left in the run directory as FAILED.
    """

    exit_code = 2


class RunDirectoryBusyError(TrainerError):
    """Another process trains in the run directory, whose marks are not this process's to set."""


class NonFiniteError(TrainerError):
    """The loss or the gradient norm is not a number. Exit status 3: starting again gives the same."""

    exit_code = 3
