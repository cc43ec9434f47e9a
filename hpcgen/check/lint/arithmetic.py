"""Evaluates bash arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hpcgen.check.lint.syntax import Node

MAX_NUMBER = 2**63
"""bash computes with 64 bits."""


class Refused(Exception):
    """The shell or a program stops with an error. The message says why."""


def divided(dividend: int, divisor: int) -> int:
    """The quotient, rounded toward 0 as in bash, expr and bc.

    Raises:
        Refused: the divisor is 0.
    """
    if divisor == 0:
        raise Refused("a division by 0")
    quotient = abs(dividend) // abs(divisor)
    return quotient if (dividend < 0) == (divisor < 0) else -quotient


def remainder(dividend: int, divisor: int) -> int:
    """The remainder, which has the sign of the dividend."""
    return dividend - divisor * divided(dividend, divisor)


def _power(base: int, exponent: int) -> int:
    if exponent < 0:
        raise Refused("an exponent less than 0")
    # a larger exponent also gives more than 64 bits
    return int(base ** (exponent if abs(base) < 2 else min(exponent, 64)))


_UNARY: Mapping[str, Callable[[int], int]] = {
    "-": lambda a: -a, "+": lambda a: a, "!": lambda a: int(not a), "~": lambda a: ~a,
}  # fmt: skip
_BINARY: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": divided, "%": remainder,
    "**": _power, "<<": lambda a, b: a << b % 64, ">>": lambda a, b: a >> b % 64,
    "&": lambda a, b: a & b, "|": lambda a, b: a | b, "^": lambda a, b: a ^ b,
    "<": lambda a, b: int(a < b), ">": lambda a, b: int(a > b), "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b), "==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b),
}  # fmt: skip


def value_of(
    node: Node,
    number: Callable[[Node], int | None],
    special: Mapping[str, Callable[[Node], int | None]] | None = None,
) -> int | None:
    """The value of an expression; None if it is not known.

    Args:
        node: the expression.
        number: returns the value of a word.
        special: operators with two operands that need a different evaluation.

    Raises:
        Refused: bash stops with an error.
    """
    if not isinstance(node, Mapping):
        return None
    kind, operator = node.get("Type"), node.get("Op", "")
    if kind == "Word":
        return number(node)
    if kind == "ParenArithm":
        return value_of(node["X"], number, special)
    if kind == "UnaryArithm" and operator in _UNARY and not node.get("Post"):
        value = value_of(node["X"], number, special)
        return None if value is None else _UNARY[operator](value)
    if kind != "BinaryArithm":
        return None
    if special and operator in special:
        return special[operator](node)
    if operator == "?":
        condition = value_of(node["X"], number, special)
        return None if condition is None else value_of(node["Y"]["X" if condition else "Y"], number, special)
    if operator not in _BINARY:
        return None
    # both sides are evaluated even if one is unknown, because `number` notes the variables
    left, right = value_of(node["X"], number, special), value_of(node["Y"], number, special)
    if left is None or right is None:
        return None
    value = _BINARY[operator](left, right)
    return value if abs(value) < MAX_NUMBER else None
