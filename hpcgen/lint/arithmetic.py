"""Arithmetic of bash over what is known: the value of an expression, or the interval that it lies in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpcgen.lint.syntax import Node, names_in

_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: int(a / b),
    "%": lambda a, b: a - b * int(a / b),
}
MAX_NUMBER = 10**15
MAX_RANDOM = 32767
"""The greatest value of $RANDOM (man bash)."""


def value_of(node: Node, number: Callable[[Node], int | None]) -> int | None:
    """The value of an expression whose words `number` knows; None when it does not know one."""
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
    """The least and the greatest value that an arithmetic expression can have."""

    least: int
    greatest: int


def _literal(word: Node) -> str:
    return "".join(part.get("Value", "") for part in word.get("Parts", []))


def interval_of(node: Node, number: Callable[[Node], int | None]) -> Interval | None:
    """What $((10000 + SLURM_JOB_ID % 20000)) can be: a remainder is bounded, whatever it is taken of."""
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
    return None
