"""Functions, calls, assignments and expansions in the shell code of a batch script, each with its place."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from hpcgen.check.lint.syntax import Node, parse

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_READERS = frozenset(("read", "mapfile", "readarray", "getopts", "wait"))
_GUARDS = frozenset((":-", "-", ":+", "+", ":=", "=", ":?", "?"))


@dataclass(frozen=True)
class Place:
    """A position in a script, and the shell that runs the code there."""

    line: int = 0
    offset: int = 0
    function: int = -1
    """Index in `Code.functions`; -1 at the top level."""
    in_subshell: bool = False
    """True if the code runs in a subshell: ( ), $( ), a pipeline, or a command in the background."""
    in_background: bool = False
    conditional: bool = False


@dataclass(frozen=True)
class Function:
    """One definition of a function."""

    name: str
    text: str
    place: Place
    end_line: int


@dataclass(frozen=True)
class Call:
    """A simple command. Literal words have no quotes; others are as written."""

    words: tuple[str, ...]
    place: Place


@dataclass(frozen=True)
class Assigned:
    """An assignment to a variable."""

    name: str
    place: Place
    text: str = ""
    """The assignment as written; "" for read, for, (( )) and similar."""
    value: str | None = None
    """A literal value without its quotes."""
    words: tuple[str, ...] | None = None
    """The elements of an array."""
    is_local: bool = False
    exported: bool = False
    append: bool = False
    indexed: bool = False


@dataclass(frozen=True)
class Expanded:
    """An expansion of a variable."""

    name: str
    place: Place
    guarded: bool = False
    """True if an unset variable is handled: ${x:-y}, ${x:?}, [[ -v x ]]."""


@dataclass(frozen=True)
class Statement:
    """A statement at the top level other than a function definition."""

    text: str
    line: int
    end_line: int


@dataclass
class Code:
    """The code of a script. Each list is in the order of the script."""

    functions: list[Function] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    assigned: list[Assigned] = field(default_factory=list)
    expanded: list[Expanded] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, int]:
        """Function -> index of its last definition, which is in effect."""
        return {function.name: index for index, function in enumerate(self.functions)}

    def name_of(self, place: Place) -> str:
        """The function that a place is in; "" at the top level."""
        return self.functions[place.function].name if place.function >= 0 else ""

    @cached_property
    def called_in(self) -> dict[str, list[Call]]:
        """Function -> commands that call it or take its name as an argument (run_step NAME)."""
        found = defaultdict(list)
        for call in self.calls:
            for word in set(call.words) & self.by_name.keys():
                found[word].append(call)
        return found

    def reachable(self, name: str) -> set[str]:
        """A function and all functions it calls, directly or indirectly."""
        found, new = {name}, [name]
        while new:
            function = new.pop()
            for call in self.calls_of(function):
                called = (set(call.words) & self.by_name.keys()) - found
                found |= called
                new += called
        return found

    def calls_of(self, name: str) -> list[Call]:
        """The commands in the effective definition of a function."""
        index = self.by_name.get(name)
        return [call for call in self.calls if call.place.function == index] if index is not None else []


@lru_cache(maxsize=16)
def read_code(text: str) -> Code:
    """Reads a script.

    Raises:
        ShellSyntaxError: the script has a syntax error.
        PackageNotFoundError: shfmt is not installed.
    """
    tree, source = parse(text)
    reader = _Reader(source)
    for statement in tree.get("Stmts", []):
        command = statement.get("Cmd") or {}
        if command.get("Type") != "FuncDecl":
            line, end = statement["Pos"]["Line"], statement["End"]["Line"]
            reader.code.statements.append(Statement(reader.text(statement), line, end))
        reader.visit(statement, Place())
    return reader.code


class _Reader:
    """Walks the syntax tree. Methods are named after the types of nodes."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self.code = Code()

    def text(self, node: Node) -> str:
        """The source text of a node."""
        return self._source[node["Pos"]["Offset"] : node["End"]["Offset"]].decode(errors="replace")

    def visit(self, node: Node, place: Place) -> None:
        """Collects a node and all nodes below it."""
        if isinstance(node, list):
            for inner in node:
                self.visit(inner, place)
        elif isinstance(node, dict):
            if node.get("Background"):
                place = replace(place, in_subshell=True, in_background=True)
            if isinstance(node.get("N"), dict) and node["N"]["Value"].startswith("{"):  # exec {file}<x
                self._set(node["N"]["Value"].strip("{}"), _at(node, place))
            special = getattr(self, f"_{node.get('Type', '').lower()}", None)
            if special:
                special(node, place)
            else:
                self._below(node, place)

    def _below(self, node: Node, place: Place) -> None:
        for inner in node.values():
            if isinstance(inner, dict | list):
                self.visit(inner, place)

    def _set(self, name: str, place: Place) -> None:
        if NAME.fullmatch(name):
            self.code.assigned.append(Assigned(name, place))

    # ---- where code runs ----

    def _funcdecl(self, node: Node, place: Place) -> None:
        name = node["Name"]["Value"]
        self.code.functions.append(Function(name, self.text(node), _at(node, place), node["End"]["Line"]))
        index = len(self.code.functions) - 1
        self.visit(node["Body"], Place(function=index))

    def _subshell(self, node: Node, place: Place) -> None:
        self._below(node, replace(place, in_subshell=True))

    _cmdsubst = _procsubst = _coprocclause = _subshell

    def _binarycmd(self, node: Node, place: Place) -> None:
        if node["Op"] in ("|", "|&"):
            self._subshell(node, place)
        else:
            self.visit(node["X"], place)
            self.visit(node["Y"], replace(place, conditional=True))

    def _ifclause(self, node: Node, place: Place) -> None:
        self.visit(node.get("Cond"), place)
        inside = replace(place, conditional=True)
        for part in (node.get("Then"), node.get("Else")):
            self.visit(part, inside)

    def _whileclause(self, node: Node, place: Place) -> None:
        self.visit(node.get("Cond"), place)
        self.visit(node.get("Do"), replace(place, conditional=True))

    def _forclause(self, node: Node, place: Place) -> None:
        loop = node.get("Loop", {})
        if loop.get("Type") == "WordIter":
            self._set(loop["Name"]["Value"], _at(node, place))
            self.visit(loop.get("Items"), place)
        else:
            self._arithmetic(loop, place)
        self.visit(node.get("Do"), replace(place, conditional=True))

    def _caseclause(self, node: Node, place: Place) -> None:
        self.visit(node["Word"], place)
        self.visit(node.get("Items"), replace(place, conditional=True))

    # ---- commands and variables ----

    def _callexpr(self, node: Node, place: Place) -> None:
        words = tuple(self._plain(word) for word in node.get("Args", []))
        for item in node.get("Assigns", []):
            if not words:
                self._assign(item, place)
            self._below(item, place)
        if not words:
            return
        place = _at(node, place)
        self.code.calls.append(Call(words, place))
        if words[0] in _READERS or words[:2] == ("printf", "-v"):
            for word in words[1:]:
                self._set(word, place)
        self.visit(node["Args"], place)

    def _declclause(self, node: Node, place: Place) -> None:
        variant, items, place = node["Variant"]["Value"], node.get("Args", []), _at(node, place)
        options = "".join(self.text(item) for item in items if not item.get("Name"))
        in_function = place.function >= 0 and variant in ("local", "declare", "typeset")
        is_local = in_function and "g" not in options
        for item in items:
            if item.get("Name"):
                exported = variant == "export" or "x" in options
                if not item.get("Naked") or is_local:
                    self._assign(item, place, is_local=is_local, exported=exported)
                elif exported:
                    self.code.assigned.append(
                        Assigned(item["Name"]["Value"], place, exported=True, indexed=True)
                    )
                self._below(item, place)
        self.code.calls.append(Call((variant, *(self.text(item) for item in items)), place))

    def _assign(self, item: Node, place: Place, *, is_local: bool = False, exported: bool = False) -> None:
        value, array = item.get("Value"), item.get("Array")
        elements = [element["Value"] for element in (array or {}).get("Elems", []) if element.get("Value")]
        plain = self._plain(value) if value else ""
        self.code.assigned.append(
            Assigned(
                item["Name"]["Value"],
                _at(item, place),
                text=self.text(item),
                value=plain if not value or "$" not in self.text(value) else None,
                words=tuple(self._plain(word) for word in elements) if array is not None else None,
                is_local=is_local,
                exported=exported,
                append=bool(item.get("Append")),
                indexed=bool(item.get("Index")),
            )
        )

    def _plain(self, word: Node) -> str:
        """A literal word without quotes; any other word as written."""
        text = ""
        for part in word.get("Parts", []):
            inner = part.get("Parts", []) if part["Type"] == "DblQuoted" else [part]
            if any(piece["Type"] not in ("Lit", "SglQuoted") for piece in inner):
                return self.text(word)
            text += "".join(piece.get("Value", "") for piece in inner)
        return text

    def _paramexp(self, node: Node, place: Place) -> None:
        place = _at(node, place)
        name, operator = (node.get("Param") or {}).get("Value", ""), (node.get("Exp") or {}).get("Op", "")
        if not node.get("Names"):
            self.code.expanded.append(Expanded(name, place, guarded=operator in _GUARDS))
        if operator in (":=", "="):
            self._set(name, place)
        self._below(node, place)

    def _unarytest(self, node: Node, place: Place) -> None:
        if node["Op"] == "-v":
            name = self._plain(node["X"]).partition("[")[0]
            self.code.expanded.append(Expanded(name, _at(node, place), guarded=True))
        self._below(node, place)

    # ---- arithmetic: a bare word is a variable ----

    def _arithmexp(self, node: Node, place: Place) -> None:
        self._arithmetic(node, place)

    _arithmcmd = _letclause = _arithmexp

    def _arithmetic(self, node: Node, place: Place) -> None:
        place = _at(node, place)
        for name, is_set in _operands(node):
            if is_set:
                self._set(name, place)
            else:
                self.code.expanded.append(Expanded(name, place))
        self._below(node, place)


def _at(node: Node, place: Place) -> Place:
    """The place with the position of a node."""
    if "Pos" not in node:
        return place
    return replace(place, line=node["Pos"]["Line"], offset=node["Pos"]["Offset"])


def _operands(node: Node) -> Iterator[tuple[str, bool]]:
    """Bare names in an arithmetic expression, and whether the expression assigns them."""
    if isinstance(node, list):
        for inner in node:
            yield from _operands(inner)
    elif isinstance(node, dict) and node.get("Type") not in ("CmdSubst", "ProcSubst", "ParamExp"):
        kind, operator = node.get("Type"), node.get("Op", "")
        is_assignment = kind == "BinaryArithm" and operator.endswith("=")
        sets = is_assignment and operator not in ("==", "!=", "<=", ">=")
        if sets or (kind == "UnaryArithm" and operator in ("++", "--")):
            yield from ((name, True) for name in _names(node["X"]))
            if operator != "=":
                yield from _operands(node["X"])
            yield from _operands(node.get("Y"))
            return
        yield from ((name, False) for name in _names(node))
        for inner in node.values():
            yield from _operands(inner)


def _names(node: Node) -> Iterator[str]:
    """The name at the start of a word in an arithmetic expression."""
    parts = node.get("Parts", [])
    if parts and parts[0].get("Type") == "Lit" and (found := NAME.match(parts[0]["Value"])):
        yield found[0]
