"""Converts values to text of a script, with one function for each place: a word, a comment, a #SBATCH value, ...

Each function refuses values that its place cannot represent, so that no value can end its word, line or here-document
early.

A filter returns `Markup`, which the environment writes unchanged. All other values go through `shell_word`.
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

# `shlex.quote` does not quote these, but bash reads them as syntax if they are a complete word.
_RESERVED_WORDS = frozenset(
    {"case", "coproc", "do", "done", "elif", "else", "esac", "fi", "for", "function", "if", "in", "select"}
    | {"then", "time", "until", "while"}
    | {"export", "file"}  # shellcheck takes these for commands whose output is meant
)
_ASSIGNMENT = re.compile(r"\w*\+?=", re.ASCII)
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# sbatch accepts these unquoted. Other characters need double quotes, in which blanks and `#` do not end the value.
# Quotes and backslashes are refused, because sbatch reads a backslash as an escape within both kinds of quotes.
# `$` and backquotes are plain text to sbatch, but not to a shell that gets the value.
_DIRECTIVE_BARE = re.compile(r"[A-Za-z0-9_.,:/@%+=-]+")
LONGEST_ARRAY = 100
"""Maximum number of characters of an array on one line. Longer arrays have one word per line."""
_DIRECTIVE_QUOTED = re.compile(r"[^\"'\\$`]+")


class UnwritableValue(HpcgenError):
    """A value that cannot be written where a template puts it."""


def shell_word(value: object) -> str:
    """One word of a shell command, quoted if necessary: `it's` becomes `'it'"'"'s'`."""
    text = _text(value)
    _refuse_unprintable(text, text)
    word = shlex.quote(text)
    # A bare comma is plain text to bash, but in an array it looks like a separator to readers and shellcheck.
    if word == text and ("," in text or text in _RESERVED_WORDS or _ASSIGNMENT.match(text)):
        return f"'{text}'"
    return word


def comment(value: object) -> Markup:
    """Text of a `#` comment on one line, unchanged."""
    text = _text(value)
    _refuse_unprintable(text, text)
    return Markup(text)


def directive(value: object) -> Markup:
    """A value of a #SBATCH line, quoted for sbatch, whose rules differ from a shell's."""
    text = _text(value)
    _refuse_unprintable(text, text)
    if not text:
        raise UnwritableValue("a #SBATCH option cannot have an empty value; remove the option")
    if _DIRECTIVE_BARE.fullmatch(text):
        return Markup(text)
    if _DIRECTIVE_QUOTED.fullmatch(text):
        return Markup(f'"{text}"')
    raise UnwritableValue(
        f"{_shown(text)} cannot be written on a #SBATCH line",
        "remove quotes, backslashes, $ and backquotes, which sbatch cannot quote safely",
    )


def heredoc(value: object) -> Markup:
    """A quoted here-document with exactly this text. A missing final newline is added.

    It must be at the end of a command's line: `cat > "$file" {{ text | heredoc }}`.
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
    """The assignment of a setting to its variable: NAME=WORD or NAME=(WORD...)."""
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
    """The pairs of a mapping for a loop. Templates cannot call methods such as `mapping.items()`."""
    _require_defined(value)
    if not isinstance(value, Mapping):
        raise UnwritableValue(f"{_shown(value)} is not a mapping and has no items")
    return value.items()


# All filters: the filters that write a value, and the one for a template's logic.
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
        str(value)  # raises UndefinedError with the name


def _text(value: object) -> str:
    """The plain text of a string, number or path, ignoring `str()` of subclasses such as enums."""
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
        f"{_shown(value)} ({type(value).__name__}) cannot be written in a script",
        "use a string, a number or a path; test None and booleans with {% if %}, and loop over lists",
    )


def _refuse_unprintable(text: str, value: str) -> None:
    """Refuses characters that end a line, control a terminal, or make a script look different."""
    if text.isprintable():
        return
    character = next(character for character in text if not character.isprintable())
    raise UnwritableValue(f"{_shown(value)} contains the unprintable character {character!a}; remove it")


def _shown(value: object) -> str:
    """The value on one line, shortened."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return short.repr(value)
