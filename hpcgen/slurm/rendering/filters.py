"""How a value becomes text of a script, one function for each place: a word, a comment, a #SBATCH value, ...

Each refuses what its place cannot hold, so that no value ends its word, its line or its here-document.

A filter gives `Markup`, which the environment writes as it is; every other value goes through `shell_word`.
"""

from __future__ import annotations

import math
import re
import reprlib
import shlex
from collections.abc import Callable, ItemsView, Mapping
from pathlib import PurePath

from jinja2 import Undefined
from markupsafe import Markup

from hpcgen.errors import HpcgenError
from hpcgen.slurm.rendering.settings import Setting

# `shlex.quote` leaves these bare as well, but bash reads them as syntax when they are a whole word.
_RESERVED_WORDS = frozenset(
    {"case", "coproc", "do", "done", "elif", "else", "esac", "fi", "for", "function", "if", "in", "select"}
    | {"then", "time", "until", "while"}
)
_ASSIGNMENT = re.compile(r"\w*\+?=", re.ASCII)
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# sbatch takes these as they stand; those of the second class only within double quotes, where blanks and `#`
# do not end the value. It reads a backslash as an escape within both kinds of quotes, so that and quotes are
# refused; `$` and a backquote mean nothing to it, but would to a shell that is handed the value.
_DIRECTIVE_BARE = re.compile(r"[A-Za-z0-9_.,:/@%+=-]+")
LONGEST_ARRAY = 100
"""Characters of an array on one line; a longer one has a line for each word."""
_DIRECTIVE_QUOTED = re.compile(r"[^\"'\\$`]+")


class UnwritableValue(HpcgenError):
    """A value that has no form in the place of a script where a template puts it."""


def shell_word(value: object) -> str:
    """One word of a shell command, quoted where bash would change it: `it's` gives `'it'"'"'s'`."""
    text = _text(value)
    _refuse_unprintable(text, text)
    word = shlex.quote(text)
    # A bare comma is a plain character to bash, and in an array looks like a separator to readers and shellcheck.
    if word == text and ("," in text or text in _RESERVED_WORDS or _ASSIGNMENT.match(text)):
        return f"'{text}'"
    return word


def comment(value: object) -> Markup:
    """Text of a `#` comment: as it is, on one line."""
    text = _text(value)
    _refuse_unprintable(text, text)
    return Markup(text)


def directive(value: object) -> Markup:
    """A value of a #SBATCH line in sbatch's own quoting, which is not a shell's."""
    text = _text(value)
    _refuse_unprintable(text, text)
    if not text:
        raise UnwritableValue("an empty text is not a value of a #SBATCH option; leave the option out")
    if _DIRECTIVE_BARE.fullmatch(text):
        return Markup(text)
    if _DIRECTIVE_QUOTED.fullmatch(text):
        return Markup(f'"{text}"')
    raise UnwritableValue(
        f"{_shown(text)} cannot be written on a #SBATCH line",
        "sbatch has no safe form for quotes, backslashes, $ and backquotes: leave them out",
    )


def heredoc(value: object) -> Markup:
    """A quoted here-document with exactly this text; a missing last newline is added.

    Stands at the end of a command's line: `cat > "$file" {{ text | heredoc }}`.
    """
    text = _text(value)
    _refuse_unprintable(text.replace("\n", "").replace("\t", ""), text)
    delimiter, count = "END_OF_TEXT", 1
    while delimiter in text:
        count += 1
        delimiter = f"END_OF_TEXT_{count}"
    newline = "" if text.endswith("\n") or not text else "\n"
    return Markup(f"<<'{delimiter}'\n{text}{newline}{delimiter}")


def variable(value: object) -> Markup:
    """The name of a shell variable, for `export {{ name | variable }}={{ value }}`."""
    text = _text(value)
    if not _VARIABLE_NAME.fullmatch(text):
        raise UnwritableValue(
            f"{_shown(text)} is not the name of a shell variable", "use letters, digits and _, no digit first"
        )
    return Markup(text)


def assignment(value: object) -> Markup:
    """A setting as the assignment of its variable: NAME=WORD, or NAME=(WORD...)."""
    _require_defined(value)
    if not isinstance(value, Setting):
        raise UnwritableValue(f"{_shown(value)} is not a setting")
    name = variable(value.name)
    if isinstance(value.value, str | int):
        return Markup(f"{name}={shell_word(value.value)}")
    words = [shell_word(word) for word in value.value]
    line = f"{name}=({' '.join(words)})"
    if len(line) > LONGEST_ARRAY:
        line = "\n".join((f"{name}=(", *(f"    {word}" for word in words), ")"))
    is_for_tasks = any("$" in word for word in words)
    comment = "# shellcheck disable=SC2016 # the tasks' shells expand it\n" if is_for_tasks else ""
    return Markup(comment + line)


def items(value: Mapping[str, object]) -> ItemsView[str, object]:
    """The pairs of a mapping, for a loop (`mapping.items()` would be a method call, which templates lack)."""
    _require_defined(value)
    if not isinstance(value, Mapping):
        raise UnwritableValue(f"{_shown(value)} has no items: it is not a mapping")
    return value.items()


# The filters that write a value, and the one that a template's logic may use. There are no others.
OUTPUT_FILTERS: dict[str, Callable[[object], Markup]] = {
    "assignment": assignment,
    "comment": comment,
    "directive": directive,
    "heredoc": heredoc,
    "variable": variable,
}
LOGIC_FILTERS: dict[str, Callable[[Mapping[str, object]], ItemsView[str, object]]] = {"items": items}


def _require_defined(value: object) -> None:
    if isinstance(value, Undefined):
        str(value)  # StrictUndefined raises UndefinedError, with the name


def _text(value: object) -> str:
    """The plain text of a string, a number or a path, whatever a subclass (an enum) makes of `str()`."""
    _require_defined(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value)
    if isinstance(value, float) and math.isfinite(value):
        return float.__repr__(value)
    if isinstance(value, PurePath):
        return str(value)
    raise UnwritableValue(
        f"{_shown(value)} ({type(value).__name__}) has no form in a script",
        "write a text, a number or a path; test None and booleans with {% if %}, and loop over lists",
    )


def _refuse_unprintable(text: str, whole: str) -> None:
    """Refuse what could end a line, steer a terminal or make a script look different from what it does."""
    if text.isprintable():
        return
    character = next(character for character in text if not character.isprintable())
    raise UnwritableValue(f"{_shown(whole)} contains the unprintable character {character!a}; remove it")


def _shown(value: object) -> str:
    """The value on one line, shortened."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return short.repr(value)
