"""Compares a site's script with the shipped templates' script for the same plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from hpcgen.check.code import Assigned, Call, Code, Expanded, Function, Place, read_code
from hpcgen.check.lint.job import Job
from hpcgen.check.lint.reader import read

_Fact = TypeVar("_Fact", Assigned, Call, Expanded)

MAIN, LAUNCH, PROLOGUE = "main", "launch", "site_prologue"
FUNCTIONS = '"$functions"'
"""Argument before the name of a function that other shells run on each node."""


@dataclass(frozen=True)
class Comparison:
    """Both scripts, read once."""

    text: str
    shipped_text: str
    vocabulary: frozenset[str]
    """Functions of all libraries, including those that this script does not contain."""

    @cached_property
    def job(self) -> Job:
        """The site's code for the rules of `hpcgen lint`. All other lines are empty."""
        kept = {number for span in self._own_spans for number in span} | self.new_lines.keys()
        lines = (
            line if number in kept or line.startswith("#") else ""
            for number, line in enumerate(self._lines, 1)
        )
        return Job(read("\n".join(lines)))

    @cached_property
    def shipped_options(self) -> dict[str, str]:
        """The effective directives of the shipped script."""
        # Reads only the directives. Reading the entire script takes as long as running all rules.
        return read("\n".join(line for line in self.shipped_text.split("\n") if line.startswith("#"))).options

    @cached_property
    def site(self) -> Code:
        """The code of the site's script."""
        return read_code(self.text)

    @cached_property
    def shipped(self) -> Code:
        """The code of the shipped script."""
        return read_code(self.shipped_text)

    # ---- what the site wrote ----

    def is_own_function(self, function: Function) -> bool:
        """True if the function differs from every shipped function with its name."""
        return function.text not in self._shipped_functions.get(function.name, ())

    @cached_property
    def _shipped_functions(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for function in self.shipped.functions:
            found.setdefault(function.name, set()).add(function.text)
        return found

    @cached_property
    def own_functions(self) -> dict[str, Function]:
        """Functions in effect that the site wrote or changed."""
        functions = (self.site.functions[index] for index in self.site.by_name.values())
        return {function.name: function for function in functions if self.is_own_function(function)}

    @cached_property
    def _own_spans(self) -> list[range]:
        """The lines of each function and each top-level statement of the site."""
        shipped = {statement.text for statement in self.shipped.statements}
        statements = (found for found in self.site.statements if found.text not in shipped)
        functions = self.own_functions.values()
        spans = [range(found.line, found.end_line + 1) for found in statements]
        return spans + [range(found.place.line, found.end_line + 1) for found in functions]

    @cached_property
    def own_lines(self) -> frozenset[int]:
        """Lines of the site's functions and top-level statements, except lines of the shipped functions."""
        lines = {number for span in self._own_spans for number in span}
        for function in self.own_functions.values():
            texts = self._shipped_functions.get(function.name, ())
            same = {line.strip() for text in texts for line in text.split("\n")}
            span = range(function.place.line, function.end_line + 1)
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

    def own(self, facts: Iterable[_Fact]) -> Iterator[_Fact]:
        """Yields the facts that are on the site's lines."""
        return (fact for fact in facts if fact.place.line in self.own_lines)

    # ---- the shells that run the code ----

    @cached_property
    def remote(self) -> frozenset[str]:
        """Functions that run on the nodes, in shells with the script's functions but without its variables."""
        found: set[str] = set()
        for call in self.site.calls:
            for word, following in itertools.pairwise(call.words):
                if word == FUNCTIONS:
                    found |= self.site.reachable(following)
        return frozenset(found)

    @cached_property
    def _in_launch(self) -> set[int]:
        names = self.site.reachable(LAUNCH) & ({LAUNCH} | self.own_functions.keys())
        return {self.site.by_name[name] for name in names if name in self.site.by_name}

    def is_in_launch(self, place: Place) -> bool:
        """True if code is in `launch`, or in a function of the site that it calls."""
        return place.function in self._in_launch

    def shell_of(self, place: Place) -> str:
        """The shell that runs code of the script.

        "job" is the script's shell, "prologue" the same shell before its traps are set again, "node" a shell on each
        node, "apart" a subshell.
        """
        return "apart" if place.in_subshell else self._shell_of_function(self.site.name_of(place), ())

    def _shell_of_function(self, name: str, above: tuple[str, ...]) -> str:
        if name == PROLOGUE:
            return "prologue"
        if name in self.remote & self.own_functions.keys():
            return "node"
        callers = [
            call for call in self.site.called_in.get(name, ()) if self.site.name_of(call.place) not in above
        ]
        shells = {
            "apart"
            if call.place.in_subshell
            else self._shell_of_function(self.site.name_of(call.place), (*above, name))
            for call in callers
        }
        return shells.pop() if len(shells) == 1 and name else "job"
