"""Reads the statements of a script in order: its commands, assignments, functions and expansions, for the rules."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hpcgen.check.lint.conditions import holds, leaves, matches
from hpcgen.check.lint.expander import AsWritten, Expander
from hpcgen.check.lint.script import (
    SETTERS,
    Assignment,
    Branch,
    Command,
    Function,
    Place,
    Script,
    Statement,
    Status,
    Use,
)
from hpcgen.check.lint.syntax import Node, ShellSyntaxError, names_in
from hpcgen.check.lint.template import parse_template
from hpcgen.check.lint.tree import (
    ARITHMETIC,
    DEFAULTS,
    GUARDS,
    NAME,
    SUBSTITUTIONS,
    Part,
    assigned_in_arithmetic,
    assignments,
    does_nothing,
    operands,
    parts_of,
)
from hpcgen.check.lint.variables import Values, Variables
from hpcgen.check.lint.words import Budget, Ranges, Variable, Word, appended, unknown_variable, variable_of
from hpcgen.check.lint.written import WrittenFiles

MAX_NESTED_SCRIPTS = 8
"""Maximum number of `bash -c` texts that are read as well."""

_STATUS = re.compile(r"\$\{?\?|PIPESTATUS")

_Branch = tuple[bool | None, Callable[[Place], None], bool]
"""True if the branch runs (None: unknown); the function that reads the branch; True if the branch ends the script."""


class Redirected(NamedTuple):
    """The redirections of a command, as the fields of `Command`."""

    here_document: str = ""
    here_line: int = 0
    here_expands: bool = False
    here_expanded: Ranges = ()
    writes_to: Word | None = None
    redirections: tuple[str, ...] = ()


class Walker:
    """Reads the statements of a script in order, and tracks the values of its variables."""

    def __init__(
        self, options: Mapping[str, str], *, trusts_defaults: bool = False, follows_values: bool = True
    ) -> None:
        self._variables = Variables(options)
        self._follows_values = follows_values
        self._new_expander = Expander if follows_values else AsWritten
        self._expander = self._new_expander(b"", self._variables)
        self._trusts_defaults = trusts_defaults
        self._budget = Budget()
        self._statement = 0
        self._nested = 0
        self._assignments: list[tuple[int, str, bool]] = []
        """The assignments in the text that is being read, in order: byte offset, variable, and whether it is a +=."""
        self._written = WrittenFiles()
        # what was found so far: the fields of `Script`
        self._commands: list[Command] = []
        self._assigned: list[Assignment] = []
        self._definitions: list[Function] = []
        self._top_level: list[Statement] = []
        self._cases: list[tuple[Branch, ...]] = []
        self._uses: list[Use] = []
        self._operands: list[Use] = []
        self._unset: set[str] = set()
        self._pipelines: list[tuple[Command, ...]] = []
        self._exported: set[str] = set()
        self._here_lines: set[int] = set()
        self._error: ShellSyntaxError | None = None
        self._text_errors: list[ShellSyntaxError] = []

    def added_to(self, script: Script) -> Script:
        """The script with everything that was found in it. Directives within here-documents are not the script's."""
        exports = [
            item for item in self._assigned if item.text and (item.exported or item.name in self._exported)
        ]
        return replace(
            script,
            directives=tuple(item for item in script.directives if item.line not in self._here_lines),
            commands=tuple(self._commands),
            statements=tuple(self._top_level),
            assigned=tuple(self._assigned),
            exports=tuple(replace(item, exported=True) for item in exports),
            definitions=tuple(sorted(self._definitions, key=lambda function: function.offset)),
            cases=tuple(self._cases),
            uses=tuple(self._uses),
            operands=tuple(self._operands),
            unset=frozenset(self._unset),
            pipelines=tuple(self._pipelines),
            error=self._error,
            text_errors=tuple(self._text_errors),
        )

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
        """Collects what is in a script, or in the text of a `bash -c`.

        Args:
            text: the script.
            line_offset: lines above the text in the file.
            on_one_line: True if everything in the text counts as its first line.
            place: context of the `bash -c`. None: the text is the script itself.
            doubts: parts of the text that come from code that may not run.
            expanded: parts of the text that another shell has expanded, with variables as written.
        """
        parsed = parse_template(text, is_script=place is None)
        self._error = self._error or parsed.error
        before = self._expander, self._assignments
        self._assignments = sorted(assignments(parsed.tree)) if self._follows_values else []
        self._expander = self._new_expander(
            parsed.source,
            self._variables,
            line_offset=line_offset,
            on_one_line=on_one_line,
            offset=place.offset if place else None,
            budget=self._budget,
            on_default=self._variables.__setitem__,
            trusts_defaults=self._trusts_defaults,
            places=parsed.places,
            doubts=_in_bytes(doubts, text, parsed.source),
            expanded=_in_bytes(expanded, text, parsed.source),
        )
        statements = parsed.tree.get("Stmts", [])
        if place is None:
            self._top_level = [
                Statement(self._expander.text_of(found), found["Pos"]["Line"], found["End"]["Line"])
                for found in statements
                if (found.get("Cmd") or {}).get("Type") != "FuncDecl"
            ]
        self._statements(statements, place or Place())
        self._expander, self._assignments = before

    def _statements(self, statements: list[Node], place: Place) -> None:
        """Reads a list of statements. The last one gives the list its status; `$?` reads that of an earlier one."""
        for index, statement in enumerate(statements):
            self._statement += 1
            following = statements[index + 1] if index + 1 < len(statements) else None
            reads = following is not None and self._reads_status(following)
            is_last = following is None
            status: Status = "tested" if reads else place.status if is_last else "plain"
            self._one(statement, place.but(status=status, statement=self._statement))
            if following is not None and leaves([statement]) and not statement.get("Background"):
                # nothing after an exit runs
                place = place.branch(False).but(in_branch=place.in_branch)

    def _reads_status(self, statement: Node) -> bool:
        """True if a statement expands $? or PIPESTATUS."""
        may_read = _STATUS.search(self._expander.text_of(statement))
        return may_read is not None and not {"?", "PIPESTATUS"}.isdisjoint(names_in(statement))

    def _one(self, statement: Node, place: Place) -> None:
        if statement.get("Negated"):
            place = place.but(status="tested")
        if statement.get("Background"):
            with self._variables.subshell():
                self._read_one(statement, place.subshell(background=True))
        else:
            self._read_one(statement, place)

    def _read_one(self, statement: Node, place: Place) -> None:
        for part in parts_of(statement):
            self._read_part(part, place)
        command = statement.get("Cmd")
        here = self._redirections(statement, place)
        if command is None:
            return
        kind = command["Type"]
        visit = getattr(self, f"_{kind.lower()}", None)
        if kind == "CallExpr":
            self._call(statement, command, place, here)
        elif visit:
            visit(command, place.but(around=(*place.around, *here.redirections)))

    def _at(self, node: Node, place: Place) -> Place:
        """The place with the position of a node."""
        line, offset = self._expander.line_of(node), self._expander.offset_of(node)
        return place.but(line=line, offset=offset)

    def _in_subshell(self, statement: Node, place: Place) -> None:
        with self._variables.subshell():
            self._one(statement, place.subshell())

    # ---- parts of a statement ----

    def _read_part(self, part: Part, place: Place) -> None:
        """Reads a substitution, or collects a variable that a part of a statement expands, tests or sets."""
        node, kind = part.node, part.kind
        if kind in SUBSTITUTIONS:
            inside = replace(place.within() if part.in_default else place, status="substituted")
            with self._variables.subshell():
                self._statements(node.get("Stmts", []), inside.subshell())
        elif kind == "ParamExp" and node.get("Param") and not node.get("Names"):
            operator, place = node.get("Exp", {}).get("Op", ""), self._at(node, place)
            self._uses.append(
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
            self._uses.append(Use(**vars(self._at(node, place)), name=name, guarded=True))
        elif kind in ARITHMETIC and not part.in_arithmetic:
            self._read_arithmetic(node, place)

    def _read_arithmetic(self, node: Node, place: Place) -> None:
        """Reads $(( )) or (( )). Only a run can tell what it assigns."""
        for word, name, is_set in operands(node):
            if is_set:
                self._set(name, self._at(node, place))
                self._variables[name] = unknown_variable(name)
            else:
                self._operands.append(Use(**vars(self._at(word, place)), name=name, in_arithmetic=True))

    def _set(self, name: str, place: Place) -> None:
        """Collects a variable that something other than an assignment sets."""
        if NAME.fullmatch(name):
            self._assigned.append(Assignment(**vars(place), name=name))

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
                    text = ""  # findings in it would have no line in the file
                else:
                    self._here_lines.update(range(line, line + text.count("\n") + 1))
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

    # ---- compound commands, each named after its type in the tree ----

    def _block(self, command: Node, place: Place) -> None:
        self._statements(command.get("Stmts", []), place)

    def _subshell(self, command: Node, place: Place) -> None:
        with self._variables.subshell():
            self._statements(command.get("Stmts", []), place.subshell())

    def _timeclause(self, command: Node, place: Place) -> None:
        if command.get("Stmt"):
            self._one(command["Stmt"], place)

    def _binarycmd(self, command: Node, place: Place) -> None:
        operator, left, right = command["Op"], command["X"], command["Y"]
        if operator in ("|", "|&"):
            first = len(self._commands)
            self._in_subshell(left, place.but(status="piped"))
            self._in_subshell(right, place)
            if len(self._commands) > first:
                self._pipelines.append(tuple(self._commands[first:]))
            return
        ignored = operator == "||" and does_nothing(right)
        self._one(left, place.but(status="ignored" if ignored else "tested"))
        runs = holds([left], self._expander)
        if runs is not None and operator == "||":
            runs = not runs
        self._branches([(runs, lambda inside: self._one(right, inside), leaves([right]))], place)

    def _ifclause(self, command: Node, place: Place) -> None:
        branches: list[_Branch] = []
        taken: bool | None = False
        while command:
            if command.get("Cond"):
                self._statements(
                    command["Cond"],
                    place.but(status="tested", in_branch=place.in_branch or bool(branches)),
                )
                condition = holds(command["Cond"], self._expander)
            else:
                condition = True
            runs = False if taken or condition is False else None if taken is None else condition
            taken = True if taken or condition else None if None in (taken, condition) else False
            branches.append(
                (runs, self._read_statements(command.get("Then", [])), leaves(command.get("Then", [])))
            )
            command = command.get("Else")
        self._branches(branches, place, exhaustive=taken is True)

    def _read_statements(self, statements: list[Node]) -> Callable[[Place], None]:
        return lambda inside: self._statements(statements, inside)

    def _branches(self, branches: Sequence[_Branch], place: Place, *, exhaustive: bool = False) -> None:
        """Reads mutually exclusive branches. With `exhaustive`, exactly one of them runs."""
        ends: list[Values] = []
        for runs, visit, leaves_script in branches:
            self._variables.begin()
            visit(place.branch(runs))
            end = self._variables.end()
            if runs or (runs is None and not leaves_script):
                ends.append(end)
        if not exhaustive and not any(runs for runs, _, _ in branches):
            ends.append({})
        self._variables.merge(ends)

    def _whileclause(self, command: Node, place: Place) -> None:
        condition = place.within(loop=True).but(status="tested", in_branch=place.in_branch)
        self._variables.begin()
        self._weaken_replaced(command)
        self._statements(command.get("Cond", []), condition)
        self._statements(command.get("Do", []), place.within(loop=True))
        self._variables.merge([{}, self._variables.end()])

    def _weaken_replaced(self, loop: Node) -> None:
        """Makes uncertain what the body of a loop replaces, since an earlier iteration may have done it."""
        replaced = (name for name, is_append in self._assigned_in(loop) if not is_append)
        self._variables.weaken((*replaced, *assigned_in_arithmetic(loop)))

    def _assigned_in(self, node: Node) -> Iterator[tuple[str, bool]]:
        """The variables that a node assigns, each with True if it is a +=."""
        first, end = (self._first_from(node[side]["Offset"]) for side in ("Pos", "End"))
        return ((name, is_append) for _, name, is_append in self._assignments[first:end])

    def _first_from(self, offset: int) -> int:
        """Index of the first assignment at a byte offset or behind it."""
        return bisect.bisect_left(self._assignments, (offset,))

    def _forclause(self, command: Node, place: Place) -> None:
        loop = command.get("Loop", {})
        name = loop.get("Name", {}).get("Value", "")
        if loop.get("Type") == "WordIter":
            items = [word for item in loop.get("Items", []) for word in self._expander.fields(item)]
            self._set(name, self._at(command, place))
            self._variables.forget((name,))
            if len(items) == 1 and _is_one_word(items[0]) and not self._is_left_early(command):
                if items[0].known:
                    self._variables[name] = variable_of(items[0].text)
                self._statements(command.get("Do", []), place.branch(True))
                return
        self._variables.begin()
        self._weaken_replaced(command)
        self._statements(command.get("Do", []), place.within(loop=True).but(loop=name))
        self._variables.merge([{}, self._variables.end()])

    def _is_left_early(self, loop: Node) -> bool:
        """True if the loop's body may end before its last statement."""
        return re.search(r"\b(break|continue)\b", self._expander.text_of(loop)) is not None

    def _caseclause(self, command: Node, place: Place) -> None:
        word = self._expander.single(command["Word"])
        branches: list[_Branch] = []
        found: list[Branch] = []
        taken: bool | None = False
        for item in command.get("Items", []):
            patterns = [self._expander.single(pattern) for pattern in item["Patterns"]]
            is_any = any(pattern.source == "*" for pattern in patterns)
            match = True if is_any else matches(word, patterns, self._expander)
            runs = False if taken or match is False else None if taken is None else match
            if item["Op"] != ";;":  # ;& and ;;& continue with the next branch
                runs = match = None
            taken = True if taken or match else None if None in (taken, match) else False
            branches.append((runs, self._read_case(item, found), leaves(item.get("Stmts", []))))
        self._branches(branches, place, exhaustive=taken is True)
        self._cases.append(tuple(found))

    def _read_case(self, item: Node, branches: list[Branch]) -> Callable[[Place], None]:
        def visit(place: Place) -> None:
            first, commands = len(self._assigned), len(self._commands)
            self._statements(
                item.get("Stmts", []),
                place.but(status="plain", conditional=True, in_branch=True, loop=""),
            )
            branches.append(
                Branch(
                    line=self._expander.line_of(item),
                    patterns=tuple(self._expander.text_of(pattern) for pattern in item["Patterns"]),
                    assigned=frozenset(found.name for found in self._assigned[first:] if found.text),
                    leaves=any(
                        found.name in ("exit", "return", "die", "usage", "error", "fatal")
                        for found in self._commands[commands:]
                    ),
                )
            )

        return visit

    def _funcdecl(self, command: Node, place: Place) -> None:
        name, at = command["Name"]["Value"], self._at(command, place)
        self._variables.begin()
        # the body runs at the call, so assignments below the function can change its variables
        end = command["End"]["Offset"]
        self._variables.weaken(name for _, name, _ in self._assignments[self._first_from(end) :])
        self._one(command["Body"], place.body(name, at.offset))
        self._variables.end_function(name, (found for found, _ in self._assigned_in(command["Body"])))
        self._definitions.append(
            Function(
                **vars(at),
                name=name,
                text=self._expander.text_of(command),
                end=self._expander.line_at(command["End"]["Line"]),
            )
        )

    def _testclause(self, command: Node, place: Place) -> None:
        for part in parts_of(command):
            if part.kind == "Word":
                self._expander.single(part.node)  # ${name:=value} sets a variable

    def _coprocclause(self, command: Node, place: Place) -> None:
        self._set(command.get("Name", {}).get("Value", "COPROC"), self._at(command, place))
        self._in_subshell(command["Stmt"], place)

    # ---- assignments and simple commands ----

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
            self._assigned.append(
                Assignment(**vars(at), name=name, exported=exports, is_local=is_local, is_declared=True)
            )
            if exports:
                self._exported.add(name)
        self._add(command, words, (variant, *map(text_of, arguments)), place)

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
        found = self._commands[-1] = self._written.read_by(found)
        self._run(found)

    def _add(
        self, node: Node, words: Sequence[Word], written: tuple[str, ...], place: Place, **more: Any
    ) -> Command:
        end = self._expander.line_at(node["End"]["Line"])
        command = Command(**vars(self._at(node, place)), words=tuple(words), written=written, end=end, **more)
        self._commands.append(command)
        return command

    def _run(self, command: Command) -> None:
        """Applies the command's effects on variables, and reads the text of a `bash -c` or of `eval`."""
        if not self._follows_values:
            return
        self._variables.run(command)
        self._written.run(command)
        if command.name == "unset":
            self._unset.update(word.text for word in command.words[1:])
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
            outer=len(self._commands) - 1,
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
                self._text_errors.append(ShellSyntaxError(word.line, error.reason))

    def _assign(self, item: Node, place: Place, *, exported: bool = False, is_local: bool = False) -> None:
        found = self._assignment(item, place)
        exported = exported or found.name in self._exported
        self._assigned.append(replace(found, exported=exported, is_local=is_local))
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


def _in_bytes(ranges: Ranges, text: str, source: bytes) -> Ranges:
    """Parts of a text as parts of its bytes; all of them if parsing has changed their number."""
    if len(source) != len(text.encode(errors="replace")):
        return ((0, len(source)),) * bool(ranges)
    return tuple(
        (len(text[:start].encode(errors="replace")), len(text[:end].encode(errors="replace")))
        for start, end in ranges
    )


def _is_one_word(item: Word) -> bool:
    """True if an item of a loop is certainly one word: a text, or a value in quotes."""
    return item.certain and (item.known or re.fullmatch(r'"[^"@]*"', item.source) is not None)
