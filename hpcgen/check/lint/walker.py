"""Walks the syntax tree of a script and collects commands, assignments and other facts for the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hpcgen.check.lint.assignments import assignment_of, variable_after
from hpcgen.check.lint.branches import merged
from hpcgen.check.lint.collected import Collected
from hpcgen.check.lint.conditions import holds, leaves, matches
from hpcgen.check.lint.expander import Expander
from hpcgen.check.lint.place import Place, Redirected
from hpcgen.check.lint.script import Branch, Command, Status, Use
from hpcgen.check.lint.syntax import Node, ShellSyntaxError, names_in
from hpcgen.check.lint.template import parse_template
from hpcgen.check.lint.tree import (
    assigned,
    assigned_in_arithmetic,
    assignments,
    does_nothing,
    names_in_arithmetic,
    uses,
    words_of_test,
)
from hpcgen.check.lint.variables import Variables
from hpcgen.check.lint.words import Budget, Ranges, Variable, Word
from hpcgen.check.lint.written import WrittenFiles

MAX_NESTED_SCRIPTS = 8
"""Maximum number of `bash -c` texts that are read as well."""

_Branch = tuple[bool | None, Callable[[Place], None], bool]
"""True if the branch runs (None: unknown); the function that reads the branch; True if the branch ends the script."""


class Walker:
    """Reads the statements of a script in order, and tracks the values of its variables."""

    def __init__(self, options: Mapping[str, str], *, trusts_defaults: bool) -> None:
        self.collected = Collected()
        self._variables = Variables(options)
        self._expander = Expander(b"", self._variables)
        self._trusts_defaults = trusts_defaults
        self._budget = Budget()
        self._place = Place()
        self._statement = 0
        self._nested = 0
        self._assignments_of_tree: list[tuple[int, str]] = []
        self._written = WrittenFiles()

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
        self.collected.error = self.collected.error or parsed.error
        before, assignments_before = self._expander, self._assignments_of_tree
        self._assignments_of_tree = [(offset, name) for offset, name, _ in assignments(parsed.tree)]
        self._expander = Expander(
            parsed.source,
            self._variables,
            line_offset=line_offset,
            on_one_line=on_one_line,
            budget=self._budget,
            visit=self._substituted,
            on_default=self._variables.__setitem__,
            trusts_defaults=self._trusts_defaults,
            places=parsed.places,
            doubts=_in_bytes(doubts, text, parsed.source),
            expanded=_in_bytes(expanded, text, parsed.source),
        )
        line_at = self._expander.line_at
        self.collected.uses += [replace(use, line=line_at(use.line)) for use in uses(parsed.tree)]
        self.collected.arithmetic += [
            Use(name=name, line=line_at(line)) for name, line in names_in_arithmetic(parsed.tree)
        ]
        self._statements(parsed.tree.get("Stmts", []), place or Place())
        self._expander, self._assignments_of_tree = before, assignments_before

    def _statements(self, statements: list[Node], place: Place) -> None:
        """Reads a list of statements. The last one gives the list its status; `$?` reads that of an earlier one."""
        for index, statement in enumerate(statements):
            self._statement += 1
            following = statements[index + 1] if index + 1 < len(statements) else None
            reads = following is not None and not {"?", "PIPESTATUS"}.isdisjoint(names_in(following))
            is_last = following is None
            status: Status = "tested" if reads else place.status if is_last else "plain"
            self._one(statement, replace(place, status=status, statement=self._statement))
            if following is not None and leaves([statement]) and not statement.get("Background"):
                place = place.branch(False)  # nothing after an exit runs

    def _substituted(self, statements: list[Node]) -> None:
        place = self._place
        self._statements(statements, replace(place, status="substituted"))
        self._place = place

    def _one(self, statement: Node, place: Place) -> None:
        if statement.get("Negated"):
            place = replace(place, status="tested")
        command = statement.get("Cmd")
        here = self._redirections(statement, place)
        if command is None:
            return
        self._place = place
        kind = command["Type"]
        visit = getattr(self, f"_{kind.lower()}", None)
        if kind == "CallExpr":
            self._call(statement, command, place, here)
        elif visit:
            visit(command, replace(place, around=(*place.around, *here.redirections)))

    def _redirections(self, statement: Node, place: Place) -> Redirected:
        """Reads the redirections of a command."""
        self._place = place
        found = Redirected()
        for redirection in statement.get("Redirs", []):
            if "Hdoc" in redirection:
                text, expanded = self._expander.here_document(redirection)
                line = self._expander.line_of(redirection["Hdoc"])
                if self._expander.on_one_line:
                    text = ""  # findings in it would have no line in the file
                else:
                    self.collected.here_lines.update(range(line, line + text.count("\n") + 1))
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
        written = (self._redirection(redirection) for redirection in statement.get("Redirs", []))
        return found._replace(redirections=tuple(written))

    def _redirection(self, redirection: Node) -> str:
        """A redirection as written, without the text of a here-document."""
        number, word = redirection.get("N", {}).get("Value", ""), redirection.get("Word")
        return f"{number}{redirection['Op']} {self._expander.text_of(word) if word else ''}".strip()

    # ---- compound commands, each named after its type in the tree ----

    def _block(self, command: Node, place: Place) -> None:
        self._statements(command.get("Stmts", []), place)

    def _subshell(self, command: Node, place: Place) -> None:
        saved = dict(self._variables)
        self._statements(command.get("Stmts", []), place)
        self._variables.restore(saved)

    def _timeclause(self, command: Node, place: Place) -> None:
        if command.get("Stmt"):
            self._one(command["Stmt"], place)

    def _binarycmd(self, command: Node, place: Place) -> None:
        operator, left, right = command["Op"], command["X"], command["Y"]
        if operator in ("|", "|&"):
            first = len(self.collected.commands)
            self._one(left, replace(place, status="piped"))
            self._one(right, place)
            if len(self.collected.commands) > first:
                self.collected.pipelines.append(tuple(self.collected.commands[first:]))
            return
        ignored = operator == "||" and does_nothing(right)
        self._one(left, replace(place, status="ignored" if ignored else "tested"))
        runs = holds([left], self._expander)
        if runs is not None and operator == "||":
            runs = not runs
        self._branches([(runs, lambda inside: self._one(right, inside), leaves([right]))], place)

    def _ifclause(self, command: Node, place: Place) -> None:
        branches: list[_Branch] = []
        taken: bool | None = False
        while command:
            if command.get("Cond"):
                self._statements(command["Cond"], replace(place, status="tested"))
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
        """Reads branches, at most one of which runs. `exhaustive`: one certainly does."""
        before = dict(self._variables)
        ends: list[dict[str, Variable]] = []
        for runs, visit, leaves_script in branches:
            self._variables.restore(before)
            visit(place.branch(runs))
            if runs or (runs is None and not leaves_script):
                ends.append(dict(self._variables))
        if not exhaustive and not any(runs for runs, _, _ in branches):
            ends.append(before)
        self._variables.restore(merged(before, ends) if ends else before)

    def _whileclause(self, command: Node, place: Place) -> None:
        inside = place.within(loop=True)
        before = self._begin_loop(command)
        self._statements(command.get("Cond", []), replace(inside, status="tested"))
        self._statements(command.get("Do", []), inside)
        self._variables.restore(merged(before, [before, dict(self._variables)]))

    def _begin_loop(self, command: Node) -> dict[str, Variable]:
        """Weakens what the loop's body replaces. Returns the variables from before the loop."""
        before = dict(self._variables)
        self._variables.weaken((*assigned(command, appends=False), *assigned_in_arithmetic(command)))
        return before

    def _forclause(self, command: Node, place: Place) -> None:
        loop = command.get("Loop", {})
        if loop.get("Type") == "WordIter":
            for item in loop.get("Items", []):
                self._expander.fields(item)
            self._variables.forget((loop["Name"]["Value"],))
        before = self._begin_loop(command)
        inside = replace(place.within(loop=True), loop=loop.get("Name", {}).get("Value", ""))
        self._statements(command.get("Do", []), inside)
        self._variables.restore(merged(before, [before, dict(self._variables)]))

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
        self.collected.cases.append(tuple(found))

    def _read_case(self, item: Node, branches: list[Branch]) -> Callable[[Place], None]:
        def visit(place: Place) -> None:
            first, commands = len(self.collected.assignments), len(self.collected.commands)
            self._statements(item.get("Stmts", []), replace(place, status="plain", conditional=True, loop=""))
            branches.append(
                Branch(
                    line=self._expander.line_of(item),
                    patterns=tuple(self._expander.text_of(pattern) for pattern in item["Patterns"]),
                    assigned=frozenset(found.name for found in self.collected.assignments[first:]),
                    leaves=any(
                        found.name in ("exit", "return", "die", "usage", "error", "fatal")
                        for found in self.collected.commands[commands:]
                    ),
                )
            )

        return visit

    def _funcdecl(self, command: Node, place: Place) -> None:
        name, first = command["Name"]["Value"], len(self.collected.commands)
        saved = dict(self._variables)
        # the body runs at the call, so assignments below the function can change its variables
        end = command["End"]["Offset"]
        self._variables.weaken(later for offset, later in self._assignments_of_tree if offset > end)
        inside = replace(place.within(), function=name)
        self._one(command["Body"], inside)
        line = self._expander.line_of(command)
        self.collected.add_function(name, line, self.collected.commands[first:])
        self._variables.end_function(name, assigned(command["Body"]), saved)

    def _arithmcmd(self, command: Node, place: Place) -> None:
        """Reads (( )). Only a run can tell what it assigns."""
        self._variables.forget(assigned_in_arithmetic(command))

    _letclause = _arithmcmd

    def _testclause(self, command: Node, place: Place) -> None:
        for word in words_of_test(command):
            self._expander.single(word)

    def _coprocclause(self, command: Node, place: Place) -> None:
        self._one(command["Stmt"], place)

    # ---- assignments and simple commands ----

    def _declclause(self, command: Node, place: Place) -> None:
        """Reads export, local, declare or readonly."""
        variant = command["Variant"]["Value"]
        options = "".join(
            self._expander.text_of(item["Value"])
            for item in command.get("Args", [])
            if not item.get("Name") and item.get("Value")
        )
        exports = variant == "export" or "x" in options
        words = [
            Word(text=variant, known=True, line=self._expander.line_of(command["Variant"]), source=variant)
        ]
        for item in command.get("Args", []):
            if item.get("Name"):
                words.append(_as_written(self._expander, item))
                if item.get("Naked") and exports:
                    self.collected.exported.add(item["Name"]["Value"])
                elif not item.get("Naked"):
                    self._assign(item, place, exported=exports)
            elif item.get("Value"):
                words += self._expander.fields(item["Value"])
        self._add(command, words, place)

    def _call(self, statement: Node, command: Node, place: Place, here: Redirected) -> None:
        arguments = command.get("Args", [])
        if not arguments:
            for item in command.get("Assigns", []):
                self._assign(item, place)
            return
        environment = tuple(assignment_of(item, place, self._expander) for item in command.get("Assigns", []))
        words: list[Word] = []
        for argument in arguments:
            words += self._expander.fields(argument)
            self._place = place
        found = self._add(
            statement,
            words,
            place,
            environment=environment,
            background=bool(statement.get("Background")),
            **here._asdict(),
        )
        found = self.collected.commands[-1] = self._written.read_by(found)
        self._run(found)

    def _add(self, node: Node, words: list[Word], place: Place, **more: object) -> Command:
        command = Command(
            words=tuple(words),
            line=self._expander.line_of(node),
            end=self._expander.line_at(node["End"]["Line"]),
            status=place.status,
            function=place.function,
            conditional=place.conditional,
            in_loop=place.in_loop,
            loop=place.loop,
            outer=place.outer,
            statement=place.statement,
            dead=place.dead,
            around=place.around,
        )
        command = replace(command, **more)  # type: ignore[arg-type]
        self.collected.commands.append(command)
        return command

    def _run(self, command: Command) -> None:
        """Applies the command's effects on variables, and reads the text of a `bash -c` or of `eval`."""
        self._variables.run(command)
        self._written.run(command)
        if command.name == "unset":
            self.collected.unset.update(word.text for word in command.words[1:])
        if text := command.shell_text or command.evaluated_text or command.file_text:
            self._nested_script(command, text)

    def _nested_script(self, command: Command, word: Word) -> None:
        if self._nested >= MAX_NESTED_SCRIPTS:
            return
        self._nested += 1
        place = Place(
            function=command.function,
            conditional=command.conditional,
            in_loop=command.in_loop,
            outer=len(self.collected.commands) - 1,
            dead=command.dead,
        )
        saved = dict(self._variables)
        # lines that come from variables are not lines of the file
        on_one_line = self._expander.on_one_line or word.text.count("\n") != word.source.count("\n")
        try:
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
                self.collected.text_errors.append(ShellSyntaxError(word.line, error.reason))
        self._variables.restore(saved)

    def _assign(self, item: Node, place: Place, *, exported: bool = False) -> None:
        assignment = assignment_of(item, place, self._expander)
        exported = exported or assignment.name in self.collected.exported
        self.collected.assignments.append(replace(assignment, exported=exported))
        self._variables[assignment.name] = variable_after(item, assignment, self._expander)


def _as_written(expander: Expander, item: Node) -> Word:
    text = expander.text_of(item)
    return Word(text=text, known=False, line=expander.line_of(item), source=text)


def _in_bytes(ranges: Ranges, text: str, source: bytes) -> Ranges:
    """Parts of a text as parts of its bytes; all of them if parsing has changed their number."""
    if len(source) != len(text.encode(errors="replace")):
        return ((0, len(source)),) * bool(ranges)
    return tuple(
        (len(text[:start].encode(errors="replace")), len(text[:end].encode(errors="replace")))
        for start, end in ranges
    )
