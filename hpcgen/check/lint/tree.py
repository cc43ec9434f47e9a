"""Searches syntax trees for variables, assignments and words."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.script import Use
from hpcgen.check.lint.syntax import Node


def does_nothing(statement: Node) -> bool:
    """True if a statement after || ignores the failure: true, :, echo."""
    command = statement.get("Cmd") or {}
    if command.get("Type") != "CallExpr" or not command.get("Args"):
        return False
    first = command["Args"][0].get("Parts", [{}])[0].get("Value", "")
    return first in ("true", ":", "echo", "printf")


def uses(node: Node) -> Iterator[Use]:
    """All expansions of variables, with their lines."""
    if isinstance(node, list):
        for inner in node:
            yield from uses(inner)
    elif isinstance(node, dict):
        if node.get("Type") == "ParamExp" and node.get("Param"):
            operator = node.get("Exp", {}).get("Op", "")
            yield Use(
                name=node["Param"]["Value"],
                line=node["Pos"]["Line"],
                guarded="Exp" in node,
                has_default=operator in (":-", "-", ":=", "="),
            )
        for inner in node.values():
            yield from uses(inner)


def names_in_arithmetic(node: Node, inside: bool = False) -> Iterator[tuple[str, int]]:
    """Variables in $(( )) and (( )), with or without $, and their lines."""
    if isinstance(node, list):
        for inner in node:
            yield from names_in_arithmetic(inner, inside)
    elif isinstance(node, dict):
        kind = node.get("Type")
        if kind in ("CmdSubst", "ProcSubst"):
            inside = False
        elif kind in ("ArithmExp", "ArithmCmd", "LetClause"):
            inside = True
        elif inside and kind == "ParamExp" and node.get("Param"):
            yield node["Param"]["Value"], node["Pos"]["Line"]
        elif inside and kind == "Lit" and re.fullmatch(r"[A-Za-z_]\w*", node["Value"], re.ASCII):
            yield node["Value"], node["Pos"]["Line"]
        for inner in node.values():
            yield from names_in_arithmetic(inner, inside)


def assigned_in_arithmetic(node: Node) -> Iterator[str]:
    """Variables that (( )) assigns."""
    if isinstance(node, list):
        for inner in node:
            yield from assigned_in_arithmetic(inner)
    elif isinstance(node, dict):
        is_assignment = node.get("Type") == "BinaryArithm" and node.get("Op", "").endswith("=")
        if (is_assignment and node["Op"] not in ("==", "!=", "<=", ">=")) or node.get(
            "Type"
        ) == "UnaryArithm":
            yield from (part["Value"] for part in node["X"].get("Parts", []) if part.get("Type") == "Lit")
        for inner in node.values():
            yield from assigned_in_arithmetic(inner)


def words_of_test(node: Node) -> Iterator[Node]:
    """The words in [[ ]]."""
    if isinstance(node, list):
        for inner in node:
            yield from words_of_test(inner)
    elif isinstance(node, dict):
        if node.get("Type") == "Word":
            yield node
            return
        for inner in node.values():
            yield from words_of_test(inner)


def assigned(node: Node, *, appends: bool = True) -> Iterator[str]:
    """Variables that a node assigns, including by += with `appends`."""
    return (name for _, name, is_append in assignments(node) if appends or not is_append)


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
            if isinstance(inner, dict | list):
                yield from assignments(inner)
