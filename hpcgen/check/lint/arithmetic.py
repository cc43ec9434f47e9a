"""Evaluates bash arithmetic: the value of an expression, or the interval that contains it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpcgen.check.lint.syntax import Node, ShellSyntaxError, names_in, parse

_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: int(a / b),
    "%": lambda a, b: a - b * int(a / b),
}
MAX_NUMBER = 10**15
MAX_RANDOM = 32767
"""The maximum value of $RANDOM (man bash)."""


def value_of(node: Node, number: Callable[[Node], int | None]) -> int | None:
    """The value of an expression. `number` returns the value of a word; None makes the result None."""
    if not isinstance(node, dict):
        return None
    kind = node.get("Type")
    if kind == "Word":
        return number(node)
    if kind == "ParenArithm":
        return value_of(node["X"], number)
    if kind == "BinaryArithm" and node.get("Op") in _OPERATORS:
        left, right = value_of(node["X"], number), value_of(node["Y"], number)
        if left is None or right is None or (node["Op"] in "/%" and right == 0):
            return None
        value = _OPERATORS[node["Op"]](left, right)
        return value if abs(value) <= MAX_NUMBER else None
    return None


@dataclass(frozen=True)
class Interval:
    """The minimum and maximum value of an arithmetic expression."""

    least: int
    greatest: int


def _literal(word: Node) -> str:
    return "".join(part.get("Value", "") for part in word.get("Parts", []))


def interval_of(node: Node, number: Callable[[Node], int | None]) -> Interval | None:
    """The interval of an expression such as 10000 + SLURM_JOB_ID % 20000, where the remainder is bounded."""
    if not isinstance(node, dict):
        return None
    value = value_of(node, number)
    if value is not None:
        return Interval(value, value)
    kind, operator = node.get("Type"), node.get("Op")
    if kind == "ParenArithm":
        return interval_of(node["X"], number)
    if kind == "Word" and (_literal(node) == "RANDOM" or list(names_in(node)) == ["RANDOM"]):
        return Interval(0, MAX_RANDOM)
    if kind != "BinaryArithm":
        return None
    divisor = value_of(node["Y"], number)
    if operator == "%" and divisor:
        dividend = interval_of(node["X"], number)
        return Interval(0, min(divisor - 1, dividend.greatest) if dividend else divisor - 1)
    left, right = interval_of(node["X"], number), interval_of(node["Y"], number)
    if operator == "+" and left and right:
        return Interval(left.least + right.least, left.greatest + right.greatest)
    if operator == "-" and left and right:
        return Interval(left.least - right.greatest, left.greatest - right.least)
    return None


def interval_of_source(source: str) -> Interval | None:
    """The interval of $((RANDOM % 1000 + 20000)) or $(shuf -i 20000-30000 -n 1). Variables are unknown."""
    drawn = re.fullmatch(
        r"\$\(\s*shuf\s[^|;&]*(?:-i|--input-range)[\s=]*(\d{1,9})-(\d{1,9})[^|;&]*\)", source
    )
    if drawn:
        return Interval(int(drawn[1]), int(drawn[2]))
    if not re.fullmatch(r"\$\(\(.*\)\)", source):
        return None
    try:
        tree, _ = parse(f"x={source}")
        [part] = tree["Stmts"][0]["Cmd"]["Assigns"][0]["Value"]["Parts"]
    except (ShellSyntaxError, ValueError, KeyError, IndexError):
        return None
    return interval_of(part.get("X"), _number_in)


def _number_in(node: Node) -> int | None:
    text = _literal(node)
    return int(text) if re.fullmatch(r"\d{1,15}", text, re.ASCII) else None
