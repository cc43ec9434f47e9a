"""Parses #SBATCH lines like sbatch: up to the first command, cut at `#`, with backslash escapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpcgen.check.lint.template import BRACES, is_tag
from hpcgen.config.fields import slurm_time
from hpcgen.config.sbatch_options import OPTIONS, matching_options

SHORT_OPTIONS = {row.short: name for name, row in OPTIONS.items() if row.short}
WITHOUT_VALUE = frozenset(name for name, row in OPTIONS.items() if row.takes == "optional")
"""Options that take no value, or take one only after `=`."""
SRUN_OPTIONS = frozenset(name for name, row in OPTIONS.items() if not row.sbatch)
"""Options of srun that sbatch refuses."""

MOVED_OPTIONS = {
    "share": "oversubscribe",
    "workdir": "chdir",
    "gpu": "gpus",
    "node": "nodes",
    "ntask": "ntasks",
}
"""Options of older releases and common misspellings -> current name."""
ALIASES = {"tasks-per-node": "ntasks-per-node"}
"""Alternative names of options -> the name used by rules."""


@dataclass(frozen=True, kw_only=True)
class Directive:
    """One option of a #SBATCH line."""

    name: str
    """The long name without dashes, with abbreviations completed. Unknown letters are kept."""
    value: str | None
    line: int
    effective: bool
    """False for directives after the first command, where sbatch stops reading."""
    cut: str = ""
    """The text that an unquoted `#` cuts off the value."""


@dataclass(frozen=True)
class Argument:
    """One option of a command line, as parsed by getopt. `index` is the index of its word."""

    name: str
    value: str | None
    index: int


def directives(lines: Sequence[str]) -> tuple[Directive, ...]:
    """All options of all #SBATCH lines."""
    end = first_command(lines)
    found = []
    for number, line in enumerate(lines, start=1):
        if not re.match(r"#SBATCH(?=[\s-])", line):
            continue
        words, cut = _words(line.removeprefix("#SBATCH"))
        arguments = list(parse_options(words))
        for argument in arguments:
            meant = matching_options(argument.name)
            found.append(
                Directive(
                    name=meant[0] if len(meant) == 1 else argument.name,
                    value=argument.value,
                    line=number,
                    effective=number < end,
                    cut=cut if argument is arguments[-1] else "",
                )
            )
    return tuple(found)


def overridden(directives: Sequence[Directive], options: Mapping[str, str | None]) -> tuple[Directive, ...]:
    """Directives with the options of a call of sbatch in their place. Further options are on the first line."""
    own = [replace(item, value=options[item.name]) if item.name in options else item for item in directives]
    names = {item.name for item in own}
    more = [
        Directive(name=name, value=value, line=1, effective=True)
        for name, value in options.items()
        if name not in names
    ]
    return (*more, *own)


def duration_as_time(text: str) -> str:
    """A duration with a unit, such as "5 days" or 24h, in Slurm's format; "" for other texts."""
    found = re.fullmatch(r"(\d{1,6})\s*(d|h|m)[a-z]*", text.strip().lower(), re.ASCII)
    if not found:
        return ""
    return slurm_time(int(found[1]) * {"d": 86400, "h": 3600, "m": 60}[found[2]])


def stray_words(lines: Sequence[str]) -> Iterator[tuple[int, str, Argument | None]]:
    """Line and text of the first word in each directive that belongs to no option, and the option before it."""
    for number, line in enumerate(lines[: first_command(lines) - 1], start=1):
        if not re.match(r"#SBATCH\s", line):
            continue
        words, _ = _words(line.removeprefix("#SBATCH"))
        rest, options = words[num_option_words(words) :], list(parse_options(words))
        if rest and rest[0] not in ("hetjob", "packjob") and not BRACES.search(rest[0]):
            yield number, rest[0], options[-1] if options else None


def first_command(lines: Sequence[str]) -> int:
    """The line where sbatch stops: the first that is neither blank nor a comment, or one past the end."""
    commands = (
        number
        for number, line in enumerate(lines, start=1)
        if line.strip() and line.lstrip()[0] != "#" and not is_tag(line)
    )
    return next(commands, len(lines) + 1)


def here_document_lines(lines: Sequence[str]) -> set[int]:
    """Lines within here-documents of a script that cannot be parsed."""
    found = set()
    end = ""
    for number, line in enumerate(lines, start=1):
        if end:
            found.add(number)
            end = "" if line.strip() == end else end
        elif begins := re.search(r"(?<!<)<<-?\s*[\"'\\]?(\w+)", line):
            end = "" if line.lstrip().startswith("#") else begins[1]
    return found


def parse_options(words: Sequence[str]) -> Iterator[Argument]:
    """The options at the start of a command line, up to the first other word."""
    index = 0
    while index < len(words):
        word, following = words[index], words[index + 1] if index + 1 < len(words) else None
        if word in ("--", "-") or not word.startswith("-"):
            return
        name, value = _option(word)
        if value is None and name not in WITHOUT_VALUE and following is not None:
            yield Argument(name, following, index)
            index += 1
        else:
            yield Argument(name, value, index)
        index += 1


def num_option_words(words: Sequence[str]) -> int:
    """Number of leading words that are options or their values."""
    end = 0
    for argument in parse_options(words):
        takes_next = argument.value is not None and _option(words[argument.index])[1] is None
        end = argument.index + (2 if takes_next else 1)
    return end + (end < len(words) and words[end] == "--")


def _option(word: str) -> tuple[str, str | None]:
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        return ALIASES.get(name, name), value if equals else None
    name = SHORT_OPTIONS.get(word[1], word[1])
    return name, word[2:] or None


def _words(text: str) -> tuple[list[str], str]:
    """The words of a directive, split like sbatch, and the text that a `#` cut off the last one.

    Source: src/sbatch/opt.c of Slurm, _get_argument: a backslash escapes within single quotes as well.
    """
    words: list[str] = []
    word: list[str] = []
    quote, in_word, position = "", False, 0
    while position < len(text):
        character = text[position]
        escaped = character == "\\" and position + 1 < len(text)
        if place := BRACES.match(text, position):  # a placeholder, which may contain blanks
            word.append(place[0])
            in_word, position = True, place.end()
            continue
        if character == "#" and not quote:
            break
        if character.isspace() and not quote:
            if in_word:
                words.append("".join(word))
            word, in_word = [], False
        elif not escaped and character == quote:
            quote = ""
        elif not escaped and not quote and character in "\"'":
            quote, in_word = character, True
        else:
            position += escaped
            word.append(text[position])
            in_word = True
        position += 1
    cut = text[position:].split(maxsplit=1)[0] if in_word and position < len(text) else ""
    return [*words, "".join(word)] if in_word else words, cut
