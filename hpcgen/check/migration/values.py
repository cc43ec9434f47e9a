"""Values of command-line options in the types of a run file's keys."""

from __future__ import annotations

import posixpath
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union

from hpcgen.check.lint.launch import Flag
from hpcgen.check.lint.words import Word
from hpcgen.check.migration.leftover import Carried, is_sure, unknown
from hpcgen.config.keys import hint_of
from hpcgen.config.megatron_options import row_of
from hpcgen.config.run import RunConfig
from hpcgen.redaction import SECRET
from hpcgen.text import one_of
from trainer.contract.config import PathKind, field_hints, paths_in

Flags = Mapping[str, Flag]
"""The certainly given options of a command line, by name without dashes."""

_DIGITS = r"\d+(?:_\d+)*"

PLACEHOLDER = re.compile(r"<[^<>]*>|/path/to\b|\b(CHANGE|REPLACE)_?(ME|THIS)\b|\bTODO\b")
"""Placeholders for values that the user of a script fills in."""

ALIASES = {("lr-wsd-decay-style", "1-sqrt"): "minus_sqrt"}
"""Values of forks -> Megatron-LM's. optimizer_param_scheduler.py of swiss-ai/Megatron-LM has the same formula."""


def typed(path: str, flag: Flag) -> Any:
    """The value of an option in the type of its key; None if it is unknown or invalid."""
    kind = _kind(path)
    if kind is bool:
        return True if not flag.values else None
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return _choices(flag, item) if typing.get_origin(item) is Literal else _numbers(flag)
    word = flag.value
    if len(flag.values) != 1 or word is None or not is_sure(word):
        return None
    text = ALIASES.get((flag.name, word.text), word.text)
    if typing.get_origin(kind) is Literal:
        # forks of Megatron-LM write rmsnorm for RMSNorm
        return next((choice for choice in typing.get_args(kind) if choice.lower() == text.lower()), None)
    if kind is int:
        return integer_of(text)
    if kind is float:
        is_number = re.fullmatch(
            rf"[+-]?({_DIGITS}\.?({_DIGITS})?|\.{_DIGITS})([eE][+-]?\d{{1,3}})?", text, re.ASCII
        )
        return float(text) if is_number else None
    if PLACEHOLDER.search(text):
        return None
    return (plain_path(text) if _names_file(path) else text) or None


def carry_as(path: str, flag: Flag, carried: Carried) -> None:
    """Carries over an option as a key. Invalid values are refused. So are unknown values that affect results."""
    if (value := typed(path, flag)) is not None:
        carried.put(path, value)
    elif is_known(flag.values) or decides(flag.name):
        carried.refuse(flag.line, shown(flag), why_not(path, flag), path)
    else:
        carried.leave(flag.line, shown(flag), why_not(path, flag))


def why_not(path: str, flag: Flag) -> str:
    """The reason why `typed` returns None for an option."""
    doubtful = next((word for word in flag.values if not is_sure(word)), None)
    if doubtful is not None:
        return unknown(doubtful)
    if any(PLACEHOLDER.search(word.text) for word in flag.values):
        return "it is a placeholder"
    takes = num_values(path)
    if takes is not None and len(flag.values) != takes:
        return f"it takes {takes or 'no'} value{'s' * (not takes)}, and has {len(flag.values)}"
    kind = _kind(path)
    if typing.get_origin(kind) is Literal:
        return f"{path} must be {one_of(typing.get_args(kind))}"
    return f"{path} cannot have this value"


def decides(name: str) -> bool:
    """True if the results can depend on an option."""
    row = row_of(name)
    return row is None or row.decides


def num_values(path: str | None) -> int | None:
    """Number of values that an option with this key takes, 1 without a key; None for any number."""
    kind = str if path is None else _kind(path)
    return None if typing.get_origin(kind) is tuple else 0 if kind is bool else 1


def shown(flag: Flag) -> str:
    """An option for a message, with up to three values. Secret and uncertain values are left out."""
    is_secret = SECRET.search(flag.name.replace("-", "_"))
    words = () if is_secret or not all(word.certain for word in flag.values) else flag.values[:3]
    return " ".join([f"--{flag.name}", *(word.text for word in words)])


def sure_text(flag: Flag) -> str:
    """The value of an option; empty if it is unknown."""
    return flag.value.text if flag.value and is_sure(flag.value) and len(flag.values) == 1 else ""


def integer(flags: Flags, name: str) -> int | None:
    """The integer value of an option; None if it has none."""
    flag = flags.get(name)
    if not flag or len(flag.values) != 1 or flag.value is None or not is_sure(flag.value):
        return None
    return integer_of(flag.value.text)


def integer_of(text: str) -> int | None:
    """The integer that Python reads, as in 732_421_875; None if it is not one of up to 15 digits."""
    is_number = re.fullmatch(rf"-?{_DIGITS}", text, re.ASCII) and len(text.replace("_", "")) <= 15
    return int(text) if is_number else None


def plain_path(text: str) -> str:
    """The path without `..`, which a run file refuses in absolute paths."""
    return posixpath.normpath(text) if text.startswith("/") and ".." in text.split("/") else text


def is_known(words: tuple[Word, ...]) -> bool:
    """True if all words are known and certainly given."""
    return all(is_sure(word) for word in words)


def _numbers(flag: Flag) -> list[int] | None:
    """The integers after an option; None if one is unknown or not an integer, or if there are none."""
    if not is_known(flag.values):
        return None
    numbers = [
        number for word in flag.values if (number := integer_of(word.text)) is not None and number >= 0
    ]
    return numbers if numbers and len(numbers) == len(flag.values) else None


def _choices(flag: Flag, kind: Any) -> list[str] | None:
    """The words after an option; None if one is unknown or not a choice, or if there are none."""
    words = [word.text for word in flag.values]
    are_choices = is_known(flag.values) and set(words) <= set(typing.get_args(kind))
    return words if words and are_choices else None


def _names_file(path: str) -> bool:
    """True if the value of a key in the run file is a path."""
    section, key = path.split(".")
    cls = field_hints(RunConfig)[section]
    return any(named.kind is PathKind.PATH for named in paths_in({key: "any"}, cls=cls))


def _kind(path: str) -> Any:
    """The type of a key in the run file, without annotations."""
    section, key = path.split(".")
    hint: Any = hint_of(RunConfig, [section, key])
    while True:
        if typing.get_origin(hint) is Annotated:
            hint = typing.get_args(hint)[0]
        elif typing.get_origin(hint) in (Union, types.UnionType):
            [hint] = [inner for inner in typing.get_args(hint) if inner is not type(None)]
        else:
            return hint
