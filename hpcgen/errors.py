"""Exceptions for mistakes of users and admins, and for failed jobs. Bugs in hpcgen raise other exceptions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePath

from trainer.contract.problem import FilePlace as FilePlace
from trainer.contract.problem import Problem as Problem
from trainer.contract.problem import as_place
from trainer.contract.problem import file_of as file_of


def problem_of(file: PurePath, reason: str, hint: str = "") -> Problem:
    """A problem of a file that is not about a key."""
    return Problem("", reason, hint, where=FilePlace(file))


class HpcgenError(Exception):
    """A mistake of the user. The command prints it without a traceback and exits with status 2."""

    mistakes: tuple[Problem, ...]

    def __init__(self, message: str | Problem, hint: str = "", *, where: str | PurePath = "") -> None:
        """`where` is the place of the mistake: a path, or for example FilePlace("run.yaml", 14).

        `hint` follows the hint of a problem.
        """
        mistake = message if isinstance(message, Problem) else Problem("", message)
        hint = "; ".join(filter(None, (mistake.hint, hint)))
        self.mistakes = (replace(mistake, hint=hint, where=as_place(where) or mistake.where),)
        super().__init__(str(self.mistakes[0]))


class ConfigErrors(HpcgenError):
    """All mistakes found in the configuration, each once."""

    def __init__(self, mistakes: Iterable[Problem]) -> None:
        self.mistakes = tuple(dict.fromkeys(mistakes))
        Exception.__init__(self, "\n".join(self.messages))

    @property
    def messages(self) -> tuple[str, ...]:
        """The mistakes as text, one line each."""
        return tuple(map(str, self.mistakes))


class FileErrors(ConfigErrors):
    """Mistakes in the keys and values of files and of --set. Rules are checked only on files without them."""


class JobStopped(KeyboardInterrupt):
    """Ctrl-C or hpcgen stop made a local job save and stop. The command exits with status 130, without a message."""


class JobFailed(Exception):
    """A job that hpcgen waited for has failed. The command prints the message and exits with status 1."""
