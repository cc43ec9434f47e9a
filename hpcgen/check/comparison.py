"""Compares a site's script with the shipped templates' script for the same plan, and registers rules about both."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from hpcgen.check.lint.reader import read
from hpcgen.check.lint.rule import Hit, Rule, Severity, rule
from hpcgen.check.lint.script import Function, Place, Script

_Found = TypeVar("_Found", bound=Place)

read_once = functools.lru_cache(maxsize=16)(read)
"""Reads a script, and remembers the last ones, because many scripts of a site are compared with the same shipped
script."""

MAIN, LAUNCH, PROLOGUE = "main", "launch", "site_prologue"
FUNCTIONS = '"$functions"'
"""Argument before the name of a function that other shells run on each node."""


@dataclass(frozen=True)
class Comparison:
    """Both scripts, read once."""

    text: str
    shipped_text: str
    vocabulary: frozenset[str]
    """Functions of all libraries, even if this script does not contain them."""

    @cached_property
    def site(self) -> Script:
        """The site's script, with words as written."""
        return read_once(self.text, follows_values=False)

    @cached_property
    def shipped(self) -> Script:
        """The shipped script, with words as written."""
        return read_once(self.shipped_text, follows_values=False)

    @cached_property
    def with_values(self) -> Script:
        """The site's functions and statements, with values and with the statements in texts of `bash -c` and `eval`."""
        # reading the rest as well would take most of the time of all rules
        kept = {number for span in self._own_spans for number in span}
        lines = (line if number in kept else "" for number, line in enumerate(self._lines, 1))
        found = read_once("\n".join(lines))
        # a line can also contain the end of a shipped function
        return read_once(self.text) if found.error else found

    # ---- what the site wrote ----

    def is_own_function(self, function: Function) -> bool:
        """True if the function differs from every shipped function with its name."""
        return function.text not in self._shipped_functions.get(function.name, ())

    @cached_property
    def _shipped_functions(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for function in self.shipped.definitions:
            found.setdefault(function.name, set()).add(function.text)
        return found

    @cached_property
    def own_functions(self) -> dict[str, Function]:
        """Functions in effect that the site wrote or changed."""
        functions = self.site.functions
        return {name: found for name, found in functions.items() if self.is_own_function(found)}

    @cached_property
    def _own_spans(self) -> list[range]:
        """The lines of each function and each top-level statement of the site."""
        shipped = {statement.text for statement in self.shipped.statements}
        statements = (found for found in self.site.statements if found.text not in shipped)
        functions = self.own_functions.values()
        spans = [range(found.line, found.end + 1) for found in statements]
        return spans + [range(found.line, found.end + 1) for found in functions]

    @cached_property
    def own_lines(self) -> frozenset[int]:
        """Lines of the site's functions and top-level statements, except lines of the shipped functions."""
        lines = {number for span in self._own_spans for number in span}
        for function in self.own_functions.values():
            texts = self._shipped_functions.get(function.name, ())
            same = {line.strip() for text in texts for line in text.split("\n")}
            span = range(function.line, function.end + 1)
            lines -= {number for number in span if self._lines[number - 1].strip() in same}
        return frozenset(lines)

    @cached_property
    def new_lines(self) -> dict[int, str]:
        """Lines, including comments, that are not in the shipped script."""
        shipped = set(self.shipped_text.split("\n"))
        return {number: line for number, line in enumerate(self._lines, 1) if line not in shipped}

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.split("\n")

    def own(self, found: Iterable[_Found]) -> Iterator[_Found]:
        """Yields the parts of the script that are on the site's lines."""
        return (part for part in found if part.line in self.own_lines)

    # ---- the shells that run the code ----

    @cached_property
    def remote(self) -> frozenset[str]:
        """Functions that run on the nodes, in shells with the script's functions but without its variables."""
        found: set[str] = set()
        for call in self.site.commands:
            for word, following in itertools.pairwise(call.written):
                if word == FUNCTIONS:
                    found |= self.site.reachable(following)
        return frozenset(found)

    @cached_property
    def _in_launch(self) -> set[int]:
        names = self.site.reachable(LAUNCH) & ({LAUNCH} | self.own_functions.keys())
        return {self.site.functions[name].offset for name in names if name in self.site.functions}

    def is_in_launch(self, place: Place) -> bool:
        """True if code is in `launch`, or in a function of the site that it calls."""
        return place.definition in self._in_launch

    def shell_of(self, place: Place) -> str:
        """The shell that runs code of the script.

        "job" is the script's shell, "prologue" the same shell before its traps are set again, "node" a shell on each
        node, "apart" a subshell.
        """
        return "apart" if place.in_subshell else self._shell_of_function(place.function, ())

    def runs_in_job(self, place: Place) -> bool:
        """True if code runs in the script's shell, so that the script sees the variables that it sets."""
        return self.shell_of(place) in ("job", "prologue")

    def _shell_of_function(self, name: str, above: tuple[str, ...]) -> str:
        if name == PROLOGUE:
            return "prologue"
        if name in self.remote & self.own_functions.keys():
            return "node"
        callers = [call for call in self.site.called_in.get(name, ()) if call.function not in above]
        shells = {
            "apart" if call.in_subshell else self._shell_of_function(call.function, (*above, name))
            for call in callers
        }
        return shells.pop() if len(shells) == 1 and name else "job"


# ---- the register of rules ----

Check = Callable[[Comparison], Iterator[Hit]]

RULES: dict[str, Rule] = {}
"""Every rule for site templates by its ID, filled when the modules of rules are imported."""


def site_rule(id: str, title: str, *, severity: Severity = "error") -> Callable[[Check], Check]:
    """Registers a function as a rule. Its docstring is the explanation."""
    return rule(id, severity, title, register=RULES)
