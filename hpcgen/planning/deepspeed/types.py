"""Types of the values in DeepSpeed's configuration. A type is a function that tells why a value is invalid.

They are stricter than DeepSpeed's in one respect: they convert nothing. In some sections, DeepSpeed's pydantic models
convert "5" to a number and 1 to a boolean. It does not check other sections at all, so a value of the wrong type fails
later or silently counts as true.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpcgen.text import did_you_mean, one_of

Reason = Callable[[Any], str | None]
"""A check: the reason why a value is invalid, or None."""


def switch(value: Any) -> str | None:
    """true or false."""
    return None if isinstance(value, bool) else f"must be true or false{_without_quotes(value)}"


def _without_quotes(value: Any) -> str:
    is_quoted = isinstance(value, str) and re.fullmatch(r"[0-9.e+-]+|true|false", value, re.IGNORECASE)
    return " without quotes" if is_quoted else ""


def anything(value: Any) -> str | None:
    """Any value. DeepSpeed passes it on."""
    return None


def nothing(value: Any) -> str | None:
    """No value but null."""
    return "must be null, because DeepSpeed does not support it"


def text(value: Any) -> str | None:
    """A string."""
    return None if isinstance(value, str) else "must be text"


def mapping(value: Any) -> str | None:
    """A mapping with any keys."""
    return None if isinstance(value, Mapping) else "must be a mapping of keys to values"


def integer(*, at_least: float | None = None, allows_exponent: bool = False) -> Reason:
    """A whole number. `allows_exponent` accepts 5e8, which pydantic converts."""

    def reason(value: Any) -> str | None:
        is_whole = isinstance(value, int) or (
            allows_exponent and isinstance(value, float) and value.is_integer()
        )
        if isinstance(value, bool) or not is_whole:
            return f"must be a whole number{_without_quotes(value)}"
        return _range(value, at_least=at_least)

    return reason


def size(*, at_least: float | None = None) -> Reason:
    """A whole number that can be written as 5e8."""
    return integer(at_least=at_least, allows_exponent=True)


def number(
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Reason:
    """A finite number."""

    def reason(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"must be a number{_without_quotes(value)}"
        return _range(value, at_least, above, at_most, below)

    return reason


def _range(
    value: float,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> str | None:
    checks = (
        ("at least", at_least, at_least is not None and value < at_least),
        ("greater than", above, above is not None and value <= above),
        ("at most", at_most, at_most is not None and value > at_most),
        ("less than", below, below is not None and value >= below),
    )
    return next(
        (f"must be {words} {limit:g}" for words, limit, broken in checks if broken and limit is not None),
        None,
    )


def choice(*names: str, any_case: bool = False) -> Reason:
    """One of these words."""

    def reason(value: Any) -> str | None:
        known = {name.lower() for name in names} if any_case else set(names)
        if isinstance(value, str) and (value.lower() if any_case else value) in known:
            return None
        hint = did_you_mean(value, names) if isinstance(value, str) else ""
        return f"must be {one_of(names)}" + (f"; {hint}" if hint else "")

    return reason


def list_of(item: Reason, length: int | None = None) -> Reason:
    """A list of values of one type."""

    def reason(value: Any) -> str | None:
        if not isinstance(value, list | tuple):
            return "must be a list"
        if length is not None and len(value) != length:
            return f"must be a list of {length}"
        wrong = ((index, item(each)) for index, each in enumerate(value))
        return next((f"has an invalid item {index}, which {why}" for index, why in wrong if why), None)

    return reason


def either(*types: Reason) -> Reason:
    """A value of one of several types."""

    def reason(value: Any) -> str | None:
        reasons = [each(value) for each in types]
        return None if None in reasons else " or ".join(why for why in reasons if why)

    return reason


_WITHOUT_LIMITS = {
    "switch": switch,
    "text": text,
    "mapping": mapping,
    "anything": anything,
    "nothing": nothing,
}
_NUMBERS: dict[str, Callable[..., Reason]] = {"number": number, "integer": integer, "size": size}
_LIMITS = {">=": "at_least", ">": "above", "<=": "at_most", "<": "below"}


def parsed(words: str) -> Reason:
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

    type: Reason
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
