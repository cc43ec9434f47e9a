"""Commands that end before the lines that should continue them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.script import Command

_CONTINUED = re.compile(r"(?<!\\)(?:\\\\)*\\([ \t]*)$")
_OPEN = re.compile(r"(\|\|?|&&|\|&|[({;]|\b(do|then|else))\s*\\\s*$")
"""Ends of lines after which bash itself reads on, over comments and empty lines."""


@rule("continuation-lost", "error", "the rest of a command is lost", source="man bash, COMMENTS; QUOTING")
def continuation_lost(job: Job) -> Iterator[Hit]:
    """A backslash continues a command on the next line. If that line is a comment or empty, the command ends there.

    A blank after the backslash ends it, too. bash runs the lines below as a command of their own, so a program starts
    without these arguments, or on the wrong side of srun.
    """
    lines = job.script.lines
    begins = {command.line for command in job.script.commands}
    begins |= {assignment.line for assignment in job.script.assignments}
    ends: dict[int, Command] = {command.end: command for command in job.script.commands}
    for number, command in sorted(ends.items()):
        found = _CONTINUED.search(lines[number - 1])
        if not found or _OPEN.search(lines[number - 1]):
            continue
        rest = number + 1
        while rest <= len(lines) and re.match(r"\s*(#|$)", lines[rest - 1]):
            rest += 1
        is_ended = rest > number + 1 or found[1]
        if rest > len(lines) or rest not in begins or not is_ended:
            continue
        if not _continues(lines[command.line - 1], lines[rest - 2], lines[rest - 1]):
            continue
        if found[1]:
            why, fix = f"the blank after the backslash on line {number}", "remove the blank"
        elif lines[number].strip():
            why, fix = f"the comment on line {number + 1}", f"move it above line {command.line}"
        else:
            why, fix = f"the empty line {number + 1}", "remove it"
        yield Hit(
            rest,
            f"{why} ends the command of line {command.line}: `{_first_words(lines[rest - 1])}` is a command of its own",
            fix,
        )


def _continues(first: str, before: str, line: str) -> bool:
    """True if a line is clearly meant to continue a command: it is an option, or indented below the command."""
    if re.match(r"\s*--?[A-Za-z]", line):
        return True
    return bool(before.strip()) and _indentation(line) > _indentation(first)


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _first_words(line: str) -> str:
    return " ".join(line.rstrip("\\ \t").split()[:2])
