"""Reads a batch script in its order, without running it, and collects its plain values."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hpcgen.check.lint import sbatch
from hpcgen.check.lint.arithmetic import Interval, interval_of
from hpcgen.check.lint.branches import merged, weak
from hpcgen.check.lint.conditions import holds, leaves, matches
from hpcgen.check.lint.script import Assignment, Branch, Command, Function, Script, Status, Use
from hpcgen.check.lint.syntax import MAX_BYTES, Node, ShellSyntaxError, names_in, parse
from hpcgen.check.lint.template import ANGLES, ANY, BRACES, masked, unmasked
from hpcgen.check.lint.tree import (
    assigned,
    assigned_in_arithmetic,
    assignments,
    does_nothing,
    names_in_arithmetic,
    uses,
    words_of_test,
)
from hpcgen.check.lint.words import Budget, Expander, Variable, Word, appended, unknown_variable, variable_of
from hpcgen.errors import HpcgenError

MAX_NESTED_SCRIPTS = 8
"""Texts given to `bash -c` that are read as well."""


def read(text: str, path: str = "-", *, trusts_defaults: bool = False) -> Script:
    """Reads a script; of one with a syntax error, or for another interpreter than a shell, only the directives.

    With `trusts_defaults`, conditions on ${NAME:-value} are resolved as if NAME were not in the environment.

    Raises:
        HpcgenError: the text is too long, or holds NUL characters: it is no script.
    """
    if "\0" in text:
        raise HpcgenError(f"{path}: is not a text", "give a shell script")
    if len(text) > MAX_BYTES:
        raise HpcgenError(f"{path}: is longer than {MAX_BYTES // 1024} KiB", "give a shell script")
    lines = tuple(text.split("\n"))
    script = Script(path=path, lines=lines, directives=sbatch.directives(lines))
    if not script.is_shell:
        return script
    try:
        reader = _Reader(script, trusts_defaults=trusts_defaults)
        reader.read(text)
        return reader.script()
    except ShellSyntaxError as found:
        error = found
    except RecursionError:
        error = ShellSyntaxError(1, "it is nested too deeply to be read")
    here_lines = _here_document_lines(lines)
    own = tuple(item for item in script.directives if item.line not in here_lines)
    return replace(script, directives=own, error=error)


class _Here(NamedTuple):
    """A here-document, as the fields of `Command`."""

    here_document: str = ""
    here_line: int = 0
    here_expands: bool = False


@dataclass(frozen=True)
class _Place:
    """Where a statement stands."""

    status: Status = "plain"
    function: str = ""
    conditional: bool = False
    in_loop: bool = False
    outer: int | None = None
    dead: bool = False
    loop: str = ""

    def within(self, *, loop: bool = False) -> _Place:
        return replace(self, status="plain", conditional=True, in_loop=self.in_loop or loop, loop="")

    def branch(self, runs: bool | None) -> _Place:
        """A branch that runs, does not, or may run (None)."""
        place = self if runs else self.within()
        return replace(place, status=self.status, dead=self.dead or runs is False)


_Branch = tuple[bool | None, Callable[[_Place], None], bool]
"""Whether a branch runs, what reads it, and whether it ends the script."""

# fmt: off
_SHELLS = ("bash", "sh", "dash", "zsh", "ksh")
_READERS = ("read", "readarray", "mapfile", "getopts")
# fmt: on


class _Reader:
    """Walks the tree of a script and collects what it finds."""

    def __init__(self, script: Script, *, trusts_defaults: bool) -> None:
        self._script = script
        self._trusts_defaults = trusts_defaults
        self._commands: list[Command] = []
        self._assignments: list[Assignment] = []
        self._functions: dict[str, Function] = {}
        self._cases: list[tuple[Branch, ...]] = []
        self._uses: list[Use] = []
        self._arithmetic: list[Use] = []
        self._unset: set[str] = set()
        self._sets: dict[str, dict[str, Variable]] = {}
        self._assignments_of_tree: list[tuple[int, str]] = []
        self._exported: set[str] = set()
        self._pipelines: list[tuple[Command, ...]] = []
        self._variables = _of_slurm(script.options)
        self._statement = 0
        self._nested = 0
        self._here_lines: set[int] = set()
        self._budget = Budget()
        self._expander = Expander(b"", self._variables)
        self._place = _Place()
        self._error: ShellSyntaxError | None = None

    def script(self) -> Script:
        exports = [item for item in self._assignments if item.exported or item.name in self._exported]
        directives = [item for item in self._script.directives if item.line not in self._here_lines]
        return replace(
            self._script,
            directives=tuple(directives),
            commands=tuple(self._commands),
            assignments=tuple(self._assignments),
            exports=tuple(replace(item, exported=True) for item in exports),
            functions=self._functions,
            cases=tuple(self._cases),
            uses=tuple(self._uses),
            arithmetic=tuple(self._arithmetic),
            unset=frozenset(self._unset),
            pipelines=tuple(self._pipelines),
            error=self._error,
        )

    def read(
        self,
        text: str,
        *,
        line_offset: int = 0,
        on_one_line: bool = False,
        place: _Place | None = None,
        doubts: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Adds what is in a script, or in the text of a `bash -c`, of which the bytes in `doubts` are uncertain."""
        tree, source, places = self._parsed(text, outer=place is None)
        before, assignments_before = self._expander, self._assignments_of_tree
        self._assignments_of_tree = [(offset, name) for offset, name, _ in assignments(tree)]
        self._expander = Expander(
            source,
            self._variables,
            line_offset=line_offset,
            on_one_line=on_one_line,
            budget=self._budget,
            visit=self._substituted,
            on_default=self._set,
            trusts_defaults=self._trusts_defaults,
            places=places,
            doubts=doubts
            if len(source) == len(text.encode(errors="replace"))
            else ((0, len(source)),) * bool(doubts),
        )
        line_at = self._expander.line_at
        self._uses += [replace(use, line=line_at(use.line)) for use in uses(tree)]
        self._arithmetic += [Use(name=name, line=line_at(line)) for name, line in names_in_arithmetic(tree)]
        self._statements(tree.get("Stmts", []), place or _Place())
        self._expander, self._assignments_of_tree = before, assignments_before

    def _parsed(self, text: str, *, outer: bool) -> tuple[Node, bytes, re.Pattern[str]]:
        """The tree of a text, the bytes that its offsets count, and the places of a template in it.

        A script that bash refuses because of a <name> is read with it as a word of which nothing is known. So is the
        text of a `bash -c` with a <NAME OF SEVERAL WORDS>, in which bash takes the next option for a file.
        """
        places = BRACES if outer or not _SEVERAL_WORDS.search(text) else ANY
        try:
            tree, source = parse(masked(text, places))
        except ShellSyntaxError as error:
            refused = None if error.is_ours else _placeholder(text, error.line)
            if refused is None:
                raise
            places = ANY
            try:
                tree, source = parse(masked(text, places))
            except ShellSyntaxError:
                raise error from None
            if outer:
                self._error = refused
        return tree, unmasked(source, text, places), places

    def _statements(self, statements: list[Node], place: _Place) -> None:
        """A list of statements: only the last one gives the list its status, unless the next reads it."""
        for index, statement in enumerate(statements):
            self._statement += 1
            following = statements[index + 1] if index + 1 < len(statements) else None
            reads = following is not None and not {"?", "PIPESTATUS"}.isdisjoint(names_in(following))
            is_last = following is None
            status: Status = "tested" if reads else place.status if is_last else "plain"
            self._one(statement, replace(place, status=status))

    def _substituted(self, statements: list[Node]) -> None:
        place = self._place
        self._statements(statements, replace(place, status="substituted"))
        self._place = place

    def _one(self, statement: Node, place: _Place) -> None:
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
            visit(command, place)

    def _redirections(self, statement: Node, place: _Place) -> _Here:
        """The here-document of a command; what redirections expand is visited."""
        self._place = place
        here = _Here()
        for redirection in statement.get("Redirs", []):
            if "Hdoc" in redirection:
                text, expands = self._expander.here_document(redirection)
                line = self._expander.line_of(redirection["Hdoc"])
                if self._expander.on_one_line:
                    text = ""  # nobody could tell the lines of what is found in it
                else:
                    self._here_lines.update(range(line, line + text.count("\n") + 1))
                here = _Here(here_document=text, here_line=line, here_expands=expands)
            elif "Word" in redirection:
                self._expander.single(redirection["Word"])
        return here

    # ---- compound commands, each named after its type in the tree ----

    def _block(self, command: Node, place: _Place) -> None:
        self._statements(command.get("Stmts", []), place)

    def _subshell(self, command: Node, place: _Place) -> None:
        saved = dict(self._variables)
        self._statements(command.get("Stmts", []), place)
        self._restore(saved)

    def _timeclause(self, command: Node, place: _Place) -> None:
        if command.get("Stmt"):
            self._one(command["Stmt"], place)

    def _binarycmd(self, command: Node, place: _Place) -> None:
        operator, left, right = command["Op"], command["X"], command["Y"]
        if operator in ("|", "|&"):
            first = len(self._commands)
            self._one(left, replace(place, status="piped"))
            self._one(right, place)
            if len(self._commands) > first:
                self._pipelines.append(tuple(self._commands[first:]))
            return
        ignored = operator == "||" and does_nothing(right)
        self._one(left, replace(place, status="ignored" if ignored else "tested"))
        runs = holds([left], self._expander)
        if runs is not None and operator == "||":
            runs = not runs
        self._branches([(runs, lambda inside: self._one(right, inside), leaves([right]))], place)

    def _ifclause(self, command: Node, place: _Place) -> None:
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

    def _read_statements(self, statements: list[Node]) -> Callable[[_Place], None]:
        return lambda inside: self._statements(statements, inside)

    def _branches(self, branches: Sequence[_Branch], place: _Place, *, exhaustive: bool = False) -> None:
        """Reads branches of which at most one runs; `exhaustive` where one of them certainly does."""
        before = dict(self._variables)
        ends: list[dict[str, Variable]] = []
        for runs, visit, leaves_script in branches:
            self._restore(before)
            visit(place.branch(runs))
            if runs or (runs is None and not leaves_script):
                ends.append(dict(self._variables))
        if not exhaustive and not any(runs for runs, _, _ in branches):
            ends.append(before)
        self._restore(merged(before, ends) if ends else before)

    def _whileclause(self, command: Node, place: _Place) -> None:
        inside = place.within(loop=True)
        before = self._begin_loop(command)
        self._statements(command.get("Cond", []), replace(inside, status="tested"))
        self._statements(command.get("Do", []), inside)
        self._restore(merged(before, [before, dict(self._variables)]))

    def _begin_loop(self, command: Node) -> dict[str, Variable]:
        """Weakens what a loop replaces, for a later turn finds it changed; gives the variables ahead of the loop."""
        before = dict(self._variables)
        for name in {
            *assigned(command, appends=False),
            *assigned_in_arithmetic(command),
        } & self._variables.keys():
            self._set(name, weak(self._variables[name]))
        return before

    def _forclause(self, command: Node, place: _Place) -> None:
        loop = command.get("Loop", {})
        if loop.get("Type") == "WordIter":
            for item in loop.get("Items", []):
                self._expander.fields(item)
            self._set(loop["Name"]["Value"], unknown_variable(loop["Name"]["Value"]))
        before = self._begin_loop(command)
        inside = replace(place.within(loop=True), loop=loop.get("Name", {}).get("Value", ""))
        self._statements(command.get("Do", []), inside)
        self._restore(merged(before, [before, dict(self._variables)]))

    def _caseclause(self, command: Node, place: _Place) -> None:
        word = self._expander.single(command["Word"])
        branches: list[_Branch] = []
        found: list[Branch] = []
        taken: bool | None = False
        for item in command.get("Items", []):
            patterns = [self._expander.single(pattern) for pattern in item["Patterns"]]
            is_any = any(pattern.source == "*" for pattern in patterns)
            match = True if is_any else matches(word, patterns, self._expander)
            runs = False if taken or match is False else None if taken is None else match
            if item["Op"] != ";;":  # ;& and ;;& go on to the next branch
                runs = match = None
            taken = True if taken or match else None if None in (taken, match) else False
            branches.append((runs, self._read_case(item, found), leaves(item.get("Stmts", []))))
        self._branches(branches, place, exhaustive=taken is True)
        self._cases.append(tuple(found))

    def _read_case(self, item: Node, branches: list[Branch]) -> Callable[[_Place], None]:
        def visit(place: _Place) -> None:
            first, commands = len(self._assignments), len(self._commands)
            self._statements(item.get("Stmts", []), replace(place, status="plain", conditional=True, loop=""))
            branches.append(
                Branch(
                    line=self._expander.line_of(item),
                    patterns=tuple(self._expander.text_of(pattern) for pattern in item["Patterns"]),
                    assigned=frozenset(found.name for found in self._assignments[first:]),
                    leaves=any(
                        found.name in ("exit", "return", "die", "usage", "error", "fatal")
                        for found in self._commands[commands:]
                    ),
                )
            )

        return visit

    def _funcdecl(self, command: Node, place: _Place) -> None:
        name, first = command["Name"]["Value"], len(self._commands)
        saved = dict(self._variables)
        # the body runs when the function is called, with what is assigned until then
        for offset, later in self._assignments_of_tree:
            if offset > command["End"]["Offset"] and later in self._variables:
                self._set(later, weak(self._variables[later]))
        inside = replace(place.within(), function=name)
        self._one(command["Body"], inside)
        own = [found for found in self._commands[first:] if found.function == name]
        runners = [
            found for found in own if found.words and found.words[0].source in ('"$@"', "$@", '"${@}"')
        ]
        self._functions[name] = Function(
            name=name,
            line=self._expander.line_of(command),
            runs_arguments=bool(runners),
            in_background=any(found.background for found in runners),
        )
        # what a function sets may be set, if it is called
        names = {*assigned(command["Body"])} & self._variables.keys()
        self._sets[name] = {changed: self._variables[changed] for changed in names}
        for changed in self._variables.keys() - saved.keys():
            saved[changed] = unknown_variable(changed)
        self._restore(saved)

    def _arithmcmd(self, command: Node, place: _Place) -> None:
        """(( )): what it sets, only a run can tell."""
        for name in assigned_in_arithmetic(command):
            self._set(name, unknown_variable(name))

    def _testclause(self, command: Node, place: _Place) -> None:
        for word in words_of_test(command):
            self._expander.single(word)

    def _letclause(self, command: Node, place: _Place) -> None:
        self._arithmcmd(command, place)

    def _coprocclause(self, command: Node, place: _Place) -> None:
        self._one(command["Stmt"], place)

    # ---- assignments and simple commands ----

    def _declclause(self, command: Node, place: _Place) -> None:
        """export, local, declare, readonly."""
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
                    self._exported.add(item["Name"]["Value"])
                elif not item.get("Naked"):
                    self._assign(item, place, exported=exports)
            elif item.get("Value"):
                words += self._expander.fields(item["Value"])
        self._add(command, words, place)

    def _call(self, statement: Node, command: Node, place: _Place, here: _Here) -> None:
        arguments = command.get("Args", [])
        if not arguments:
            for item in command.get("Assigns", []):
                self._assign(item, place)
            return
        environment = tuple(self._assignment(item, place) for item in command.get("Assigns", []))
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
        self._effects(found)

    def _add(self, node: Node, words: list[Word], place: _Place, **more: object) -> Command:
        command = Command(
            words=tuple(words),
            line=self._expander.line_of(node),
            end=self._expander.line_at(node["End"]["Line"]),
            status=place.status,
            function=place.function,
            conditional=place.conditional,
            in_loop=place.in_loop,
            outer=place.outer,
            statement=self._statement,
            dead=place.dead,
        )
        command = replace(command, **more)  # type: ignore[arg-type]
        self._commands.append(command)
        return command

    def _effects(self, command: Command) -> None:
        """What builtins do to variables, and the script in the text of `bash -c`."""
        texts = [word.text for word in command.words]
        # a trap runs its text at any time from now on
        runs = re.findall(r"\w+", texts[1]) if command.name == "trap" and len(texts) > 2 else [command.name]
        for name in runs:
            if called := self._sets.get(name):
                now = dict(self._variables)
                self._restore(merged(now, [now, {**now, **called}]))
            elif command.name == "trap" and name in self._variables:
                self._set(name, weak(self._variables[name]))
        if command.name == "unset":
            for name in texts[1:]:
                self._unset.add(name)
                if not command.conditional:
                    self._variables.pop(name, None)
        elif command.name in _READERS or texts[:2] == ["printf", "-v"]:
            for name in texts[1:]:
                if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                    self._set(name, unknown_variable(name))
        for index, word in enumerate(command.words[:-2]):
            is_shell = word.text.rpartition("/")[2] in _SHELLS
            following = index + 1
            while following < len(texts) - 1 and texts[following].startswith(("-", "+")):
                if is_shell and re.fullmatch(r"-\w*c", texts[following]):
                    self._nested_script(command, command.words[following + 1])
                    return
                following += 1

    def _nested_script(self, command: Command, word: Word) -> None:
        if self._nested >= MAX_NESTED_SCRIPTS:
            return
        self._nested += 1
        place = _Place(
            function=command.function,
            conditional=command.conditional,
            in_loop=command.in_loop,
            outer=len(self._commands) - 1,
            dead=command.dead,
        )
        saved = dict(self._variables)
        # lines that come from variables are not those of the file
        on_one_line = self._expander.on_one_line or word.text.count("\n") != word.source.count("\n")
        # a text that is put together from what is not known here may be no script
        with contextlib.suppress(ShellSyntaxError):
            self.read(
                word.text,
                line_offset=word.line - 1,
                on_one_line=on_one_line,
                place=place,
                doubts=tuple(_in_bytes(word.text, part) for part in word.doubts or _all_of(word)),
            )
        self._restore(saved)

    def _assign(self, item: Node, place: _Place, *, exported: bool = False) -> None:
        assignment = self._assignment(item, place)
        exported = exported or assignment.name in self._exported
        self._assignments.append(replace(assignment, exported=exported))
        self._set(assignment.name, self._value(item, assignment))

    def _assignment(self, item: Node, place: _Place) -> Assignment:
        value = self._expander.single(item["Value"]) if item.get("Value") else None
        items = None
        if "Array" in item:
            elements = [element["Value"] for element in item["Array"].get("Elems", []) if "Value" in element]
            items = tuple(word for element in elements for word in self._expander.fields(element))
        return Assignment(
            name=item["Name"]["Value"],
            line=self._expander.line_of(item),
            value=value,
            items=items,
            append=bool(item.get("Append")),
            conditional=place.conditional,
            function=place.function,
            outer=place.outer,
            interval=self._interval(item.get("Value")),
            dead=place.dead,
            loop=place.loop,
        )

    def _value(self, item: Node, assignment: Assignment) -> Variable:
        """The variable after the assignment."""
        if item.get("Index"):
            return unknown_variable(assignment.name)
        if assignment.items is not None:
            variable = Variable(items=assignment.items)
        elif item.get("Value"):
            variable = self._expander.scalar(item["Value"])
        else:
            variable = variable_of("")
        return appended(self._variables.get(assignment.name), variable) if assignment.append else variable

    def _interval(self, value: Node) -> Interval | None:
        parts = (value or {}).get("Parts", [])
        if len(parts) == 1 and parts[0]["Type"] == "DblQuoted":
            parts = parts[0].get("Parts", [])
        if len(parts) != 1 or parts[0]["Type"] != "ArithmExp":
            return None
        return interval_of(parts[0].get("X"), self._expander.arithmetic)

    def _set(self, name: str, variable: Variable) -> None:
        self._variables[name] = variable

    def _restore(self, saved: dict[str, Variable]) -> None:
        self._variables.clear()
        self._variables.update(saved)


_SEVERAL_WORDS = re.compile(r"(?<!<)<[A-Z]{2,} [\w .-]*\w>")


def _placeholder(text: str, line: int) -> ShellSyntaxError | None:
    """The error for a <name> on a line that bash refuses; None where the line has none."""
    lines = text.split("\n")
    found = ANGLES.search(lines[line - 1]) if 0 < line <= len(lines) else None
    reason = "is a placeholder that bash reads as a redirection"
    return ShellSyntaxError(line, f"`{found[0]}` {reason}", is_placeholder=True) if found else None


def _of_slurm(options: dict[str, str]) -> dict[str, Variable]:
    """What Slurm sets in the job, as far as the directives tell."""
    names = {
        "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
        "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
        "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
        "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
        "job-name": ("SLURM_JOB_NAME",),
    }
    found = {}
    per_node, nodes = options.get("ntasks-per-node", ""), options.get("nodes", "")
    if "ntasks" not in options and per_node.isdigit() and nodes.isdigit():
        options = {**options, "ntasks": str(int(per_node) * int(nodes))}
    for option, variables in names.items():
        value = options.get(option, "")
        if value.isdigit() or (option == "job-name" and value):
            found.update({variable: variable_of(value) for variable in variables})
    return found


def _here_document_lines(lines: Sequence[str]) -> set[int]:
    """Lines within here-documents of a script that cannot be parsed."""
    found = set()
    end = ""
    for number, line in enumerate(lines, start=1):
        if end:
            found.add(number)
            end = "" if line.strip() == end else end
        elif begins := re.search(r"(?<!<)<<-?\s*[\"'\\]?(\w+)", line):
            end = "" if line.lstrip().startswith("#") else begins[1]
    return found


def _as_written(expander: Expander, item: Node) -> Word:
    text = expander.text_of(item)
    return Word(text=text, known=False, line=expander.line_of(item), source=text)


def _in_bytes(text: str, part: tuple[int, int]) -> tuple[int, int]:
    start, end = part
    return len(text[:start].encode(errors="replace")), len(text[:end].encode(errors="replace"))


def _all_of(word: Word) -> tuple[tuple[int, int], ...]:
    return () if word.certain else ((0, len(word.text)),)
