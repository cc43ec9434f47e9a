"""Commands that end before the lines that should continue them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.script import Command
from hpcgen.check.lint.words import Word

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
        yield Hit.at(
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


@rule("comment-in-quotes", "error", "a comment in quotes loses or adds arguments", source="man bash, QUOTING")
def comment_in_quotes(job: Job) -> Iterator[Hit]:
    """In double quotes, a backslash joins a comment with the lines below, so `bash -c` ignores all of them.

    In a variable that becomes a program's arguments, `#` and the words after it are arguments.
    """
    for command in job.script.commands:
        text = command.shell_text
        for first, last in _joined_comments(text) if text is not None else ():
            yield Hit.at(
                first,
                f"the shell of bash -c ignores lines {first} to {last}: in double quotes, the backslashes join them",
                f"remove line {first}, or write the text in single quotes and the comment above the command",
            )
    for launch in job.launches:
        for word, following in itertools.pairwise(launch.arguments):
            is_comment = word.text.startswith("#--") or (word.text == "#" and following.text.startswith("--"))
            if is_comment and word.known and word.source.startswith("$"):
                yield Hit.at(
                    launch.line,
                    f"{word.source} is text, so `{word.text}` and the words after it are arguments of the program",
                    'remove the line of the comment, or make it an array: args=(...), and "${args[@]}"',
                )
                break


def _joined_comments(text: Word) -> Iterator[tuple[int, int]]:
    """First and last lines of the file that a comment in a text in double quotes hides."""
    lines = text.source.split("\n") if text.source.startswith('"') else []
    last = 0
    for index, line in enumerate(lines[1:], start=1):
        is_first = index > last and lines[index - 1].endswith("\\") and line.lstrip().startswith("#")
        if not is_first or not line.endswith("\\"):
            continue
        last = index
        while last + 1 < len(lines) and lines[last].endswith("\\"):
            last += 1
        if lines[last].strip(' \t"'):
            yield text.line + index, text.line + last
