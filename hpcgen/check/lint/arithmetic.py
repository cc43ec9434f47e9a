"""Evaluates bash arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hpcgen.check.lint.syntax import Node

_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: int(a / b),
    "%": lambda a, b: a - b * int(a / b),
}
MAX_NUMBER = 10**15


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
