"""Types of the values in DeepSpeed's configuration. A type is a function that finds the problem of a value.

They are stricter than DeepSpeed's in one respect: they convert nothing. In some sections, DeepSpeed's pydantic models
convert "5" to a number and 1 to a boolean. It does not check other sections at all, so a value of the wrong type fails
later or silently counts as true.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpcgen.errors import Problem
from hpcgen.text import did_you_mean, one_of
from trainer.contract.config import Range

Check = Callable[[str, Any], Problem | None]
"""The problem of an invalid value at a path; None if it is valid."""


def switch(path: str, value: Any) -> Problem | None:
    """true or false."""
    is_valid = isinstance(value, bool)
    return None if is_valid else Problem(path, f"must be true or false{_without_quotes(value)}")


def _without_quotes(value: Any) -> str:
    is_quoted = isinstance(value, str) and re.fullmatch(r"[0-9.e+-]+|true|false", value, re.IGNORECASE)
    return " without quotes" if is_quoted else ""


def anything(path: str, value: Any) -> Problem | None:
    """Any value. DeepSpeed passes it on."""
    return None


def nothing(path: str, value: Any) -> Problem | None:
    """No value but null."""
    return Problem(path, "must be null, because DeepSpeed does not support it")


def text(path: str, value: Any) -> Problem | None:
    """A string."""
    return None if isinstance(value, str) else Problem(path, "must be text")


def mapping(path: str, value: Any) -> Problem | None:
    """A mapping with any keys."""
    return None if isinstance(value, Mapping) else Problem(path, "must be a mapping of keys to values")


def integer(*, at_least: float | None = None, allows_exponent: bool = False) -> Check:
    """A whole number. `allows_exponent` accepts 5e8, which pydantic converts."""
    limits = Range(at_least=at_least)

    def problem(path: str, value: Any) -> Problem | None:
        is_whole = isinstance(value, int) or (
            allows_exponent and isinstance(value, float) and value.is_integer()
        )
        if isinstance(value, bool) or not is_whole:
            return Problem(path, f"must be a whole number{_without_quotes(value)}")
        return limits.problem(path, value)

    return problem


def size(*, at_least: float | None = None) -> Check:
    """A whole number that can be written as 5e8."""
    return integer(at_least=at_least, allows_exponent=True)


def number(
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Check:
    """A finite number."""
    limits = Range(at_least=at_least, above=above, at_most=at_most, below=below)

    def problem(path: str, value: Any) -> Problem | None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return Problem(path, f"must be a number{_without_quotes(value)}")
        return limits.problem(path, value)

    return problem


def choice(*names: str, any_case: bool = False) -> Check:
    """One of these words."""

    def problem(path: str, value: Any) -> Problem | None:
        known = {name.lower() for name in names} if any_case else set(names)
        if isinstance(value, str) and (value.lower() if any_case else value) in known:
            return None
        hint = did_you_mean(value, names) if isinstance(value, str) else ""
        return Problem(path, f"must be {one_of(names)}", hint)

    return problem


def list_of(item: Check, length: int | None = None) -> Check:
    """A list of values of one type."""

    def problem(path: str, value: Any) -> Problem | None:
        if not isinstance(value, list | tuple):
            return Problem(path, "must be a list")
        if length is not None and len(value) != length:
            return Problem(path, f"must be a list of {length}")
        for index, each in enumerate(value):
            if wrong := item(path, each):
                return replace(wrong, reason=f"has an invalid item {index}, which {wrong.reason}")
        return None

    return problem


def either(*types: Check) -> Check:
    """A value of one of several types."""

    def problem(path: str, value: Any) -> Problem | None:
        found = [each(path, value) for each in types]
        problems = [each for each in found if each is not None]
        if len(problems) < len(types):
            return None
        hint = next((each.hint for each in problems if each.hint), "")
        return Problem(path, " or ".join(each.reason for each in problems), hint)

    return problem


_WITHOUT_LIMITS = {
    "switch": switch,
    "text": text,
    "mapping": mapping,
    "anything": anything,
    "nothing": nothing,
}
_NUMBERS: dict[str, Callable[..., Check]] = {"number": number, "integer": integer, "size": size}
_LIMITS = {">=": "at_least", ">": "above", "<=": "at_most", "<": "below"}


def parsed(words: str) -> Check:
    """The type that these words of keys.txt describe, such as "integer >=1 or one of auto"."""
    alternatives = words.split(" or ")
    if len(alternatives) > 1:
        return either(*map(parsed, alternatives))
    if words in _WITHOUT_LIMITS:
        return _WITHOUT_LIMITS[words]
    kind, _, items = words.partition(" of ")
    if kind == "list":
        length, space, item = items.partition(" ")
        return list_of(parsed(item), int(length)) if length.isdigit() and space else list_of(parsed(items))
    if kind in ("one", "any case"):
        return choice(*items.split(", "), any_case=kind == "any case")
    kind, *bounds = words.split()
    found = [re.fullmatch(r"([<>]=?)(-?[0-9.]+)", bound) for bound in bounds]
    limits = {_LIMITS[each[1]]: float(each[2]) for each in found if each}
    return _NUMBERS[kind](**limits)


@dataclass(frozen=True)
class Key:
    """A key of DeepSpeed's configuration."""

    type: Check
    auto: bool = False
    """"auto" is allowed, because Hugging Face's Trainer or Accelerate fills it in."""
    nullable: bool = False
    """null is allowed, and is the default."""
    required: bool = False
    """The section must have the key."""
    deprecated: str = ""
    """The replacement of a deprecated key."""


@dataclass(frozen=True)
class Section:
    """A mapping with known keys."""

    keys: dict[str, Key | Section]
    source: str
    """The code of DeepSpeed that reads the section."""
    nullable: bool = False
    open: bool = False
    """Unknown keys are allowed, because they are arguments of a class that DeepSpeed does not define."""
