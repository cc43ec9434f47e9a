"""Reads simple commands, assignments and the parts of statements: expansions, arithmetic and redirections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hpcgen.check.lint.expander import AsWritten, Expander
from hpcgen.check.lint.found import Found
from hpcgen.check.lint.script import (
    SETTERS,
    Assignment,
    Command,
    Place,
    Use,
)
from hpcgen.check.lint.syntax import Node, ShellSyntaxError
from hpcgen.check.lint.tree import (
    ARITHMETIC,
    DEFAULTS,
    GUARDS,
    NAME,
    SUBSTITUTIONS,
    Part,
    operands,
)
from hpcgen.check.lint.variables import Variables
from hpcgen.check.lint.words import Ranges, Variable, Word, appended, unknown_variable, variable_of
from hpcgen.check.lint.written import WrittenFiles

MAX_NESTED_SCRIPTS = 8
"""Maximum number of `bash -c` texts that are read as well."""


class Redirected(NamedTuple):
    """The redirections of a command, as the fields of `Command`."""

    here_document: str = ""
    here_line: int = 0
    here_expands: bool = False
    here_expanded: Ranges = ()
    writes_to: Word | None = None
    redirections: tuple[str, ...] = ()


class SimpleCommands(ABC):
    """Reads what is in a statement, apart from compound commands, and tracks the values of variables."""

    def __init__(
        self, options: Mapping[str, str], *, trusts_defaults: bool = False, follows_values: bool = True
    ) -> None:
        self._variables = Variables(options)
        self._follows_values = follows_values
        self._new_expander = Expander if follows_values else AsWritten
        self._expander = self._new_expander(b"", self._variables)
        self._trusts_defaults = trusts_defaults
        self._found = Found()
        self._written = WrittenFiles()
        self._nested = 0

    @abstractmethod
    def walk(
        self,
        text: str,
        *,
        line_offset: int = 0,
        on_one_line: bool = False,
        place: Place | None = None,
        doubts: Ranges = (),
        expanded: Ranges = (),
    ) -> None:
        """Collects what is in a script, or in the text of a `bash -c`."""

    @abstractmethod
    def _statements(self, statements: list[Node], place: Place) -> None:
        """Reads a list of statements."""

    def _at(self, node: Node, place: Place) -> Place:
        """The place with the position of a node."""
        line, offset = self._expander.line_of(node), self._expander.offset_of(node)
        return place.but(line=line, offset=offset)

    def _read_part(self, part: Part, place: Place) -> None:
        """Reads a substitution, or collects a variable that a part of a statement expands, tests or sets."""
        node, kind = part.node, part.kind
        if kind in SUBSTITUTIONS:
            if self._expander.has_run(node):
                return  # its commands were read with the text of that shell
            inside = replace(place.within() if part.in_default else place, status="substituted")
            with self._variables.subshell():
                self._statements(node.get("Stmts", []), inside.subshell())
        elif kind == "ParamExp" and node.get("Param") and not node.get("Names"):
            operator, place = node.get("Exp", {}).get("Op", ""), self._at(node, place)
            self._found.uses.append(
                Use(
                    **vars(place),
                    name=node["Param"]["Value"],
                    guarded=operator in GUARDS,
                    has_default=operator in DEFAULTS,
                    in_arithmetic=part.in_arithmetic,
                )
            )
            if operator in (":=", "="):
                self._set(node["Param"]["Value"], place)
        elif kind == "UnaryTest" and node["Op"] == "-v":
            name = self._expander.plain(node["X"]).partition("[")[0]
            self._found.uses.append(Use(**vars(self._at(node, place)), name=name, guarded=True))
        elif kind in ARITHMETIC and not part.in_arithmetic:
            self._read_arithmetic(node, place)

    def _read_arithmetic(self, node: Node, place: Place) -> None:
        """Reads $(( )) or (( )). Only a run can tell what it assigns."""
        for word, name, is_set in operands(node):
            if is_set:
                self._set(name, self._at(node, place))
                self._variables[name] = unknown_variable(name)
            else:
                self._found.operands.append(Use(**vars(self._at(word, place)), name=name, in_arithmetic=True))

    def _set(self, name: str, place: Place) -> None:
        """Collects a variable that something other than an assignment sets."""
        if NAME.fullmatch(name):
            self._found.assigned.append(Assignment(**vars(place), name=name))

    def _redirections(self, statement: Node, place: Place) -> Redirected:
        """Reads the redirections of a command."""
        found = Redirected()
        if "Redirs" not in statement:
            return found
        for redirection in statement["Redirs"]:
            if (descriptor := redirection.get("N", {}).get("Value", "")).startswith("{"):  # exec {file}<x
                self._set(descriptor.strip("{}"), self._at(redirection, place))
            if "Hdoc" in redirection:
                text, expanded = self._expander.here_document(redirection)
                line = self._expander.line_of(redirection["Hdoc"])
                if self._expander.on_one_line:
                    text = ""  # findings in this text would have no line in the file
                else:
                    self._found.here_lines.update(range(line, line + text.count("\n") + 1))
                found = found._replace(
                    here_document=text,
                    here_line=line,
                    here_expands=expanded is not None,
                    here_expanded=expanded or (),
                )
            elif "Word" in redirection:
                word = self._expander.single(redirection["Word"])
                if redirection["Op"] in (">", ">|", ">>", "&>", "&>>"):
                    self._written.change(word)
                if redirection["Op"] in (">", ">|") and redirection.get("N", {}).get("Value", "1") == "1":
                    found = found._replace(writes_to=word)
        written = (self._redirection(redirection) for redirection in statement["Redirs"])
        return found._replace(redirections=tuple(written))

    def _redirection(self, redirection: Node) -> str:
        """A redirection as written, without the text of a here-document."""
        number, word = redirection.get("N", {}).get("Value", ""), redirection.get("Word")
        return f"{number}{redirection['Op']} {self._expander.text_of(word) if word else ''}".strip()

    # ---- simple commands ----

    def _call(self, statement: Node, command: Node, place: Place, here: Redirected) -> None:
        arguments = command.get("Args", [])
        if not arguments:
            for item in command.get("Assigns", []):
                self._assign(item, place)
            return
        environment = tuple(self._assignment(item, place) for item in command.get("Assigns", []))
        words = [word for argument in arguments for word in self._expander.fields(argument)]
        written = tuple(map(self._expander.plain, arguments))
        found = self._add(
            statement,
            words,
            written,
            place,
            environment=environment,
            background=bool(statement.get("Background")),
            **here._asdict(),
        )
        if written[0] in SETTERS or written[:2] == ("printf", "-v"):
            for name in written[1:]:
                self._set(name, self._at(command, place))
        found = self._found.commands[-1] = self._written.read_by(found)
        self._run(found)

    def _add(
        self, node: Node, words: Sequence[Word], written: tuple[str, ...], place: Place, **more: Any
    ) -> Command:
        end = self._expander.line_at(node["End"]["Line"])
        command = Command(**vars(self._at(node, place)), words=tuple(words), written=written, end=end, **more)
        self._found.commands.append(command)
        return command

    def _run(self, command: Command) -> None:
        """Applies the command's effects on variables, and reads the text of a `bash -c` or of `eval`."""
        if not self._follows_values:
            return
        self._variables.run(command)
        self._written.run(command)
        if command.name == "unset":
            self._found.unset.update(word.text for word in command.words[1:])
        if text := command.shell_text or command.evaluated_text or command.file_text:
            self._nested_script(command, text)

    def _nested_script(self, command: Command, word: Word) -> None:
        if self._nested >= MAX_NESTED_SCRIPTS:
            return
        self._nested += 1
        place = Place(
            offset=command.offset,
            function=command.function,
            definition=command.definition,
            conditional=command.conditional,
            in_loop=command.in_loop,
            in_subshell=True,
            outer=len(self._found.commands) - 1,
            dead=command.dead,
        )
        # lines that come from variables are not lines of the file
        on_one_line = self._expander.on_one_line or word.text.count("\n") != word.source.count("\n")
        try:
            with self._variables.subshell():
                self.walk(
                    word.text,
                    line_offset=word.line - 1,
                    on_one_line=on_one_line,
                    place=place,
                    doubts=word.doubts or (() if word.certain else ((0, len(word.text)),)),
                    expanded=word.unknowns,
                )
        except ShellSyntaxError as error:
            if word.certain and word is not command.file_text and not (command.dead or error.is_ours):
                self._found.text_errors.append(ShellSyntaxError(word.line, error.reason))

    # ---- assignments ----

    def _declclause(self, command: Node, place: Place) -> None:
        """Reads export, local, declare or readonly."""
        variant, arguments, at = (
            command["Variant"]["Value"],
            command.get("Args", []),
            self._at(command, place),
        )
        text_of = self._expander.text_of
        options = "".join(text_of(item) for item in arguments if not item.get("Name"))
        exports = variant == "export" or "x" in options
        is_local = bool(place.function) and variant in ("local", "declare", "typeset") and "g" not in options
        words = [Word(text=variant, known=True, line=at.line, source=variant)]
        for item in arguments:
            if not item.get("Name"):
                words += self._expander.fields(item["Value"]) if item.get("Value") else ()
                continue
            text = text_of(item)
            words.append(Word(text=text, known=False, line=self._expander.line_of(item), source=text))
            if not item.get("Naked"):
                self._assign(item, place, exported=exports, is_local=is_local)
                continue
            name = item["Name"]["Value"]
            self._found.assigned.append(
                Assignment(**vars(at), name=name, exported=exports, is_local=is_local, is_declared=True)
            )
            if exports:
                self._found.exported.add(name)
        self._add(command, words, (variant, *map(text_of, arguments)), place)

    def _assign(self, item: Node, place: Place, *, exported: bool = False, is_local: bool = False) -> None:
        found = self._assignment(item, place)
        exported = exported or found.name in self._found.exported
        self._found.assigned.append(replace(found, exported=exported, is_local=is_local))
        self._variables[found.name] = self._variable_after(item, found)

    def _assignment(self, item: Node, place: Place) -> Assignment:
        """Converts a node of the syntax tree to an assignment."""
        elements = [found["Value"] for found in item.get("Array", {}).get("Elems", []) if "Value" in found]
        items = tuple(word for element in elements for word in self._expander.fields(element))
        return Assignment(
            **vars(self._at(item, place)),
            name=item["Name"]["Value"],
            text=self._expander.text_of(item),
            value=self._expander.single(item["Value"]) if item.get("Value") else None,
            items=items if "Array" in item else None,
            written=tuple(map(self._expander.plain, elements)),
            append=bool(item.get("Append")),
            indexed=bool(item.get("Index")),
        )

    def _variable_after(self, item: Node, assignment: Assignment) -> Variable:
        """The variable after the assignment."""
        if assignment.indexed:
            return unknown_variable(assignment.name)
        if assignment.items is not None:
            variable = Variable(items=assignment.items)
        elif item.get("Value"):
            variable = self._expander.scalar(item["Value"])
        else:
            variable = variable_of("")
        return appended(self._variables.get(assignment.name), variable) if assignment.append else variable
