"""Reads the statements of a script in order, with branches, loops and functions, for the rules."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from hpcgen.check.lint.conditions import holds, leaves, matches
from hpcgen.check.lint.script import (
    Branch,
    Count,
    Function,
    Place,
    Script,
    Statement,
    Status,
)
from hpcgen.check.lint.simple_commands import SimpleCommands
from hpcgen.check.lint.syntax import Node, names_in
from hpcgen.check.lint.template import parse_template
from hpcgen.check.lint.tree import (
    assigned_in_arithmetic,
    assignments,
    counted,
    does_nothing,
    parts_of,
)
from hpcgen.check.lint.variables import Values
from hpcgen.check.lint.words import Budget, Ranges, Word, variable_of

_STATUS = re.compile(r"\$\{?\?|PIPESTATUS")

_Branch = tuple[bool | None, Callable[[Place], None], bool]
"""True if the branch runs (None: unknown); the function that reads the branch; True if the branch ends the script."""


class Walker(SimpleCommands):
    """Reads the statements of a script in order, and tracks the values of its variables."""

    def __init__(self, options: Mapping[str, str], **settings: bool) -> None:
        super().__init__(options, **settings)
        self._budget = Budget()
        self._statement = 0
        self._assignments: list[tuple[int, str, bool]] = []
        """The assignments in the text that is being read, in order: byte offset, variable, and whether it is a +=."""

    def added_to(self, script: Script) -> Script:
        """The script with everything that was found in it."""
        return self._found.added_to(script)

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
        self._found.error = self._found.error or parsed.error
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
            self._found.statements = [
                Statement(self._expander.text_of(found), found["Pos"]["Line"], found["End"]["Line"])
                for found in statements
                if (found.get("Cmd") or {}).get("Type") != "FuncDecl"
            ]
        self._statements(statements, place or Place())
        self._expander, self._assignments = before

    def _statements(self, statements: list[Node], place: Place) -> None:
        """Reads a list of statements. The last statement gives the list its status; `$?` reads the status of an earlier
        statement."""
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

    def _in_subshell(self, statement: Node, place: Place) -> None:
        with self._variables.subshell():
            self._one(statement, place.subshell())

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
            first = len(self._found.commands)
            self._in_subshell(left, place.but(status="piped"))
            self._in_subshell(right, place)
            if len(self._found.commands) > first:
                self._found.pipelines.append(tuple(self._found.commands[first:]))
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
        self._found.cases.append(tuple(found))

    def _read_case(self, item: Node, branches: list[Branch]) -> Callable[[Place], None]:
        def visit(place: Place) -> None:
            first, commands = len(self._found.assigned), len(self._found.commands)
            self._statements(
                item.get("Stmts", []),
                place.but(status="plain", conditional=True, in_branch=True, loop=""),
            )
            branches.append(
                Branch(
                    line=self._expander.line_of(item),
                    patterns=tuple(self._expander.text_of(pattern) for pattern in item["Patterns"]),
                    assigned=frozenset(found.name for found in self._found.assigned[first:] if found.text),
                    leaves=any(
                        found.name in ("exit", "return", "die", "usage", "error", "fatal")
                        for found in self._found.commands[commands:]
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
        self._found.definitions.append(
            Function(
                **vars(at),
                name=name,
                text=self._expander.text_of(command),
                end=self._expander.line_at(command["End"]["Line"]),
            )
        )

    def _arithmcmd(self, command: Node, place: Place) -> None:
        self._count(command, command.get("X"), place)

    def _letclause(self, command: Node, place: Place) -> None:
        self._count(command, command["Exprs"][-1], place)

    def _count(self, command: Node, expression: Node | None, place: Place) -> None:
        """Collects a command whose status can be 1 because its value is 0."""
        found = counted(expression)
        if found:
            text = self._expander.text_of(command)
            self._found.counts.append(
                Count(**vars(self._at(command, place)), name=found[0], operator=found[1], text=text)
            )

    def _testclause(self, command: Node, place: Place) -> None:
        for part in parts_of(command):
            if part.kind == "Word":
                self._expander.single(part.node)  # ${name:=value} sets a variable

    def _coprocclause(self, command: Node, place: Place) -> None:
        self._set(command.get("Name", {}).get("Value", "COPROC"), self._at(command, place))
        self._in_subshell(command["Stmt"], place)


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
