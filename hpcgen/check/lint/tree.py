"""Searches syntax trees for expansions, assignments and words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from hpcgen.check.lint.syntax import Node

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
SUBSTITUTIONS = frozenset(("CmdSubst", "ProcSubst"))
ARITHMETIC = frozenset(("ArithmExp", "ArithmCmd", "LetClause", "CStyleLoop"))
DEFAULTS = frozenset((":-", "-", ":=", "="))
"""Operators of ${name:-word} that replace an unset variable."""
_LITERALS = frozenset(("Lit", "SglQuoted"))
_NODES = (dict, list)
GUARDS = DEFAULTS | {":+", "+", ":?", "?"}
"""Operators that handle an unset variable."""


class Part(NamedTuple):
    """A node of a statement, with its position in the statement."""

    node: Node
    kind: str
    in_arithmetic: bool
    in_default: bool
    """True within ${name:-...} and similar, which bash does not always expand."""


def parts_of(statement: Node) -> Iterator[Part]:
    """The nodes of a statement in order. Literals and the nodes of nested statements are left out."""
    stack = [(statement, False, False)]
    while stack:
        node, in_arithmetic, in_default = stack.pop()
        if isinstance(node, list):
            stack += [(inner, in_arithmetic, in_default) for inner in reversed(node)]
            continue
        kind = node.get("Type", "")
        if kind in _LITERALS or (not kind and node is not statement and _is_statement(node)):
            continue
        if kind:
            yield Part(node, kind, in_arithmetic, in_default)
        if kind not in SUBSTITUTIONS:
            in_arithmetic = kind in ARITHMETIC or (in_arithmetic and kind != "ParamExp")
            stack += [
                (inner, in_arithmetic, in_default or key == "Exp")
                for key, inner in reversed(node.items())
                if isinstance(inner, _NODES)
            ]


def _is_statement(node: Node) -> bool:
    return "Cmd" in node or "Redirs" in node


def operands(node: Node) -> Iterator[tuple[Node, str, bool]]:
    """The bare names in an arithmetic expression: the word, the name, and whether the expression assigns it."""
    if isinstance(node, list):
        for inner in node:
            yield from operands(inner)
    elif isinstance(node, dict) and node.get("Type") not in (*SUBSTITUTIONS, "ParamExp"):
        kind, operator = node.get("Type"), node.get("Op", "")
        is_assignment = kind == "BinaryArithm" and operator.endswith("=")
        sets = is_assignment and operator not in ("==", "!=", "<=", ">=")
        if sets or (kind == "UnaryArithm" and operator in ("++", "--")):
            yield from ((node["X"], name, True) for name in _names(node["X"]))
            if operator != "=":
                yield from operands(node["X"])
            yield from operands(node.get("Y"))
            return
        yield from ((node, name, False) for name in _names(node))
        for inner in node.values():
            if isinstance(inner, _NODES):
                yield from operands(inner)


def counted(expression: Node | None) -> tuple[str, str] | None:
    """The variable and the operator of name++, name-- and name=0; None for other expressions."""
    if not expression or expression.get("Type") not in ("UnaryArithm", "BinaryArithm"):
        return None
    operator, name = expression["Op"], next(_names(expression["X"]), "")
    is_step = expression.get("Post") and operator in ("++", "--")
    is_zero = operator == "=" and [part.get("Value") for part in expression["Y"].get("Parts", ())] == ["0"]
    return (name, operator) if name and (is_step or is_zero) else None


def _names(node: Node) -> Iterator[str]:
    """The name at the start of a word in an arithmetic expression."""
    parts = node.get("Parts", [])
    if parts and parts[0].get("Type") == "Lit" and (found := NAME.match(parts[0]["Value"])):
        yield found[0]


def does_nothing(statement: Node) -> bool:
    """True if a statement after || ignores the failure: true, :, echo."""
    command = statement.get("Cmd") or {}
    if command.get("Type") != "CallExpr" or not command.get("Args"):
        return False
    first = command["Args"][0].get("Parts", [{}])[0].get("Value", "")
    return first in ("true", ":", "echo", "printf")


def assigned_in_arithmetic(node: Node) -> Iterator[str]:
    """Variables that $(( )) and (( )) assign in a node."""
    return (name for _, name, is_set in operands(node) if is_set)


def assignments(node: Node) -> Iterator[tuple[int, str, bool]]:
    """The byte offset, variable, and whether it is a +=, for each assignment in a node."""
    if isinstance(node, list):
        for inner in node:
            yield from assignments(inner)
    elif isinstance(node, dict):
        items = [
            *node.get("Assigns", []),
            *(node.get("Args", []) if node.get("Type") == "DeclClause" else []),
        ]
        for item in items:
            if item.get("Name"):
                yield item["Pos"]["Offset"], item["Name"]["Value"], bool(item.get("Append"))
        for inner in node.values():
            if isinstance(inner, _NODES):
                yield from assignments(inner)
