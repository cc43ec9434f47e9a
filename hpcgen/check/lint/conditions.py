"""Evaluates conditions on known words: True, False, or None if only a run can tell."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hpcgen.check.lint.expander import Expander
from hpcgen.check.lint.syntax import Node
from hpcgen.check.lint.words import Word

_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b, "<": lambda a, b: a < b, "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
}  # fmt: skip
_OPTIONS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


def holds(statements: Sequence[Node], expander: Expander) -> bool | None:
    """True if the last of a list of statements succeeds."""
    quiet = replace(expander, on_default=lambda name, variable: None)
    return _statement(statements[-1], quiet) if statements else None


def matches(word: Word, patterns: Sequence[Word], expander: Expander) -> bool | None:
    """True if a word matches one of the patterns of a `case` branch."""
    if not expander.decides(word):
        return None
    found = [_matches(word.text, pattern) for pattern in patterns]
    return True if True in found else None if None in found else False


def _matches(text: str, pattern: Word) -> bool | None:
    if pattern.variables:
        return None  # the value may be a pattern
    if pattern.known:
        return text == pattern.text
    is_plain = re.fullmatch(r"[\w.,:/*?-]*", pattern.source, re.ASCII)
    return fnmatch.fnmatchcase(text, pattern.text) if is_plain else None


def leaves(statements: Sequence[Node]) -> bool:
    """True if a branch ends the script."""
    command = (statements[-1].get("Cmd") or {}) if statements else {}
    if command.get("Type") != "CallExpr" or not command.get("Args"):
        return False
    return [part.get("Value") for part in command["Args"][0].get("Parts", [])] == ["exit"]


def _statement(statement: Node, expander: Expander) -> bool | None:
    found = _command(statement.get("Cmd") or {}, expander)
    return _not(found) if statement.get("Negated") else found


def _command(command: Node, expander: Expander) -> bool | None:
    kind = command.get("Type")
    if kind == "CallExpr":
        words = [word for argument in command.get("Args", []) for word in expander.fields(argument)]
        return _program(words, expander)
    if kind == "TestClause":
        return _test(command["X"], expander)
    if kind == "ArithmCmd":
        return _arithmetic(command.get("X"), expander)
    if kind in ("Block", "Subshell"):
        statements = command.get("Stmts", [])
        return _statement(statements[-1], expander) if statements else None
    if kind == "BinaryCmd" and command["Op"] in ("&&", "||"):
        return _both(command["Op"], _statement(command["X"], expander), _statement(command["Y"], expander))
    return None


def _program(words: Sequence[Word], expander: Expander) -> bool | None:
    name = words[0].text if words else ""
    if name in ("true", ":"):
        return True
    if name == "false":
        return False
    if name == "[" and words[-1].text == "]":
        words = words[:-1]
    elif name != "test":
        return None
    operands = words[1:]
    if not all(expander.decides(word) for word in operands):
        return None
    return _operands([word.text for word in operands])


def _operands(texts: Sequence[str]) -> bool | None:
    """The result of `test`, determined by the number of arguments as in POSIX."""
    match list(texts):
        case []:
            return False
        case [text]:
            return bool(text)
        case ["-n", text]:
            return bool(text)
        case ["-z" | "!", text]:
            return not text
        case [left, operator, right] if operator in ("=", "==", "!=") or operator in _OPTIONS:
            return _compared(left, operator, right)
        case ["!", *rest] if len(rest) < 4:
            return _not(_operands(rest))
    return None


def _compared(left: str, operator: str, right: str) -> bool | None:
    if operator in ("=", "=="):
        return left == right
    if operator == "!=":
        return left != right
    if not all(re.fullmatch(r"-?(0|[1-9]\d{0,14})", text, re.ASCII) for text in (left, right)):
        return None
    return _COMPARED[_OPTIONS[operator]](int(left), int(right))


def _test(node: Node, expander: Expander) -> bool | None:
    """The result of [[ ]]."""
    kind = node.get("Type")
    if kind == "ParenTest":
        return _test(node["X"], expander)
    if kind == "UnaryTest":
        if node["Op"] == "!":
            return _not(_test(node["X"], expander))
        text = _known(node["X"], expander) if node["Op"] in ("-n", "-z") else None
        return None if text is None else bool(text) == (node["Op"] == "-n")
    if kind == "BinaryTest" and node["Op"] in ("&&", "||"):
        return _both(node["Op"], _test(node["X"], expander), _test(node["Y"], expander))
    if kind == "BinaryTest":
        left, right = _known(node["X"], expander), _known(node["Y"], expander)
        is_compared = node["Op"] in ("=", "==", "!=") or node["Op"] in _OPTIONS
        if left is None or right is None or not is_compared or set("*?[(\\") & set(right):
            return None
        return _compared(left, node["Op"], right)
    text = _known(node, expander)
    return None if text is None else bool(text)


def _known(node: Node, expander: Expander) -> str | None:
    word = expander.single(node)
    return word.text if expander.decides(word) else None


def _arithmetic(node: Node, expander: Expander) -> bool | None:
    """The result of (( )), which is true if the value is not 0."""
    kind, operator = node.get("Type"), node.get("Op")
    if kind == "ParenArithm":
        return _arithmetic(node["X"], expander)
    if kind == "UnaryArithm" and operator == "!":
        return _not(_arithmetic(node["X"], expander))
    if kind == "BinaryArithm" and operator in ("&&", "||"):
        return _both(operator, _arithmetic(node["X"], expander), _arithmetic(node["Y"], expander))
    if kind == "BinaryArithm" and operator in _COMPARED:
        left, right = expander.certain_arithmetic(node["X"]), expander.certain_arithmetic(node["Y"])
        return None if left is None or right is None else _COMPARED[operator](left, right)
    value = expander.certain_arithmetic(node)
    return None if value is None else value != 0


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _both(operator: str, left: bool | None, right: bool | None) -> bool | None:
    """The result of && or || with unknown operands."""
    decisive = operator == "||"
    if decisive in (left, right):
        return decisive
    return None if None in (left, right) else not decisive
