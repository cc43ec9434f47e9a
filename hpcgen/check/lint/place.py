"""The context of a statement in a script: its function, branch, loop and `bash -c`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from hpcgen.check.lint.script import Status
from hpcgen.check.lint.words import Ranges, Word


class Redirected(NamedTuple):
    """The redirections of a command, as the fields of `Command`."""

    here_document: str = ""
    here_line: int = 0
    here_expands: bool = False
    here_expanded: Ranges = ()
    writes_to: Word | None = None
    redirections: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """The context of a statement. Its fields are those of `Command` and `Assignment`."""

    status: Status = "plain"
    function: str = ""
    conditional: bool = False
    in_loop: bool = False
    outer: int | None = None
    dead: bool = False
    loop: str = ""
    statement: int = 0
    around: tuple[str, ...] = ()

    def within(self, *, loop: bool = False) -> Place:
        """The place of a statement in the body of a compound command, which may not run."""
        return replace(self, status="plain", conditional=True, in_loop=self.in_loop or loop, loop="")

    def branch(self, runs: bool | None) -> Place:
        """The place of a branch that runs, does not run, or may run (None)."""
        place = self if runs else self.within()
        return replace(place, status=self.status, dead=self.dead or runs is False)
