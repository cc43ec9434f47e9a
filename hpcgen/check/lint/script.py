"""A batch script as plain data: directives, assignments, commands with arguments, functions.

Words are unknown unless the script itself determines them. `hpcgen.check.lint.walker` makes these values.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from hpcgen.check.lint import sbatch
from hpcgen.check.lint.syntax import ShellSyntaxError
from hpcgen.check.lint.words import Ranges, Word, joined

SHELLS = frozenset(("bash", "sh", "dash", "ash", "ksh", "mksh", "zsh", "busybox"))
"""Interpreters whose scripts are read as bash."""

_LETTERS = {"a": "allexport", "e": "errexit", "u": "nounset", "v": "verbose", "x": "xtrace"}
"""Short names of shell options -> their long names."""

SETTERS = ("read", "readarray", "mapfile", "getopts", "wait")
"""Builtins that set the variables they name."""

Status = Literal["plain", "tested", "ignored", "piped", "substituted"]
"""Use of a command's exit status: unchecked, checked, discarded by `|| true`, hidden by a pipe, or inside $( )."""


def switched(arguments: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """The shell options that arguments of `set` or of a shell turn on (True) or off."""
    rest = iter(arguments)
    for text in rest:
        if text == "-":
            yield from (("xtrace", False), ("verbose", False))
        if re.match(r"--\w", text):
            continue  # bash --login
        if not re.fullmatch(r"[-+]\w+", text):
            return
        for letter in text[1:]:
            name = next(rest, "") if letter == "o" else _LETTERS.get(letter, "")
            if name:
                yield name, text[0] == "-"


def shebang_switches(line: str) -> Iterator[tuple[str, bool]]:
    """The shell options that the first line of a script turns on."""
    shebang = re.match(r"#!\s*(?:\S*env\s+(?:-S\s*)?)?\S*sh\b(.*)", line)
    return switched(shebang[1].split() if shebang else ())


@dataclass(frozen=True, kw_only=True)
class Place:
    """The context of a part of a script: its position, function, branch and loop, and the shell that runs it."""

    line: int = 0
    offset: int = 0
    """Byte offset in the script. In the text of a `bash -c`, the offset of the bash command."""
    function: str = ""
    """The function whose body contains this part; "" if there is none."""
    definition: int = -1
    """Offset of that function, which tells two definitions with the same name apart."""
    status: Status = "plain"
    conditional: bool = False
    """True if this part is in a function or loop, or in a branch that may not run."""
    in_branch: bool = False
    """True if this part is in any branch or loop of its function, or after && or ||."""
    in_loop: bool = False
    loop: str = ""
    """Variable of the `for` whose every iteration runs this part; "" if there is none."""
    in_subshell: bool = False
    """True if a subshell runs this part: ( ), $( ), a pipeline, or a command in the background."""
    in_background: bool = False
    """True if this part is in a command or group that runs in the background."""
    outer: int | None = None
    """Index in `Script.commands` of the command whose `bash -c` text contains this part."""
    dead: bool = False
    """True if this part is in a branch that never runs."""
    statement: int = 0
    """Number of its statement. Statements within a body have their own numbers."""
    around: tuple[str, ...] = ()
    """Redirections of the groups, loops and conditions that contain it."""

    def but(self, **changes: Any) -> Place:
        """A copy of the place with other values. `dataclasses.replace` would take much of the time of reading a
        script."""
        place = object.__new__(Place)
        vars(place).update(vars(self), **changes)
        return place

    def within(self, *, loop: bool = False) -> Place:
        """The place of a statement in the body of a compound command, which may not run."""
        return self.but(
            status="plain", conditional=True, in_branch=True, in_loop=self.in_loop or loop, loop=""
        )

    def branch(self, runs: bool | None) -> Place:
        """The place of a branch that runs, does not run, or may run (None)."""
        place = self.but(in_branch=True) if runs else self.within()
        return place.but(status=self.status, dead=self.dead or runs is False)

    def subshell(self, *, background: bool = False) -> Place:
        """The place of a statement that a subshell runs."""
        return self.but(in_subshell=True, in_background=self.in_background or background)

    def body(self, function: str, definition: int) -> Place:
        """The place of the body of a function, which is defined here and runs in the shell that calls it."""
        inside = self.within().but(function=function, definition=definition)
        return inside.but(in_branch=False, in_subshell=False, in_background=False)


@dataclass(frozen=True, kw_only=True)
class Assignment(Place):
    """A place that sets or declares a variable: name=value, name=(items), read, for, (( name = 1 )), `local name`."""

    name: str
    text: str = ""
    """name=value as written; "" if the variable is set or declared in another way."""
    value: Word | None = None
    items: tuple[Word, ...] | None = None
    written: tuple[str, ...] = ()
    """The items as written; literal words are without quotes."""
    exported: bool = False
    is_local: bool = False
    is_declared: bool = False
    """True for `local name` or `export name`, which set no value."""
    append: bool = False
    indexed: bool = False
    """True for name[index]=value."""


@dataclass(frozen=True, kw_only=True)
class Command(Place):
    """A simple command on the lines from `line` to `end`."""

    words: tuple[Word, ...]
    written: tuple[str, ...] = ()
    """Its words as written; literal words are without quotes."""
    end: int
    environment: tuple[Assignment, ...] = ()
    """Assignments in front of the command, NAME=value. They apply only to this command."""
    background: bool = False
    """True if the statement ends with &."""
    here_document: str = ""
    """Text of its <<EOF, with variables as written."""
    here_line: int = 0
    """First line of the here-document."""
    here_expands: bool = False
    """True if the shell expands variables in the here-document, because its delimiter has no quotes."""
    redirections: tuple[str, ...] = ()
    """Redirections as written, such as "> log" and "<<EOF"."""
    here_expanded: Ranges = ()
    """Where it expands something."""
    writes_to: Word | None = None
    """The file that its output replaces."""
    file_text: Word | None = None
    """The text of the shell script that it runs, if a here-document of the script has written the file."""
    file_arguments: tuple[Word, ...] = ()
    """The arguments of that script."""

    @property
    def name(self) -> str:
        """The program's name without its directory."""
        return self.words[0].text.rpartition("/")[2] if self.words else ""

    @property
    def evaluated_text(self) -> Word | None:
        """The text that `eval` runs; None for other commands, or if only the job knows which program starts."""
        words = self.words[1:]
        if self.name != "eval" or not words or words[0].text.startswith(("$", "`")):
            return None
        return joined(words)

    @cached_property
    def shell_text(self) -> Word | None:
        """The text that the command passes to `bash -c`; None if it passes none."""
        # eval joins its words and parses them again; the others start nothing
        if self.name in ("eval", "echo", "printf"):
            return None
        texts = [word.text for word in self.words]
        for index, text in enumerate(texts[:-2]):
            following = index + 1
            while following < len(texts) - 1 and texts[following].startswith(("-", "+")):
                if text.rpartition("/")[2] in SHELLS and re.fullmatch(r"-\w*c", texts[following]):
                    return self.words[following + 1]
                following += 1
        return None


@dataclass(frozen=True, kw_only=True)
class Count(Place):
    """A command that changes a number and has its old or new value as status: (( name++ )), let name=0."""

    name: str
    operator: str
    """++ or -- behind the name, or = with the value 0."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Function(Place):
    """A definition of a function."""

    name: str
    text: str = ""
    end: int
    """The last line."""


@dataclass(frozen=True)
class Statement:
    """A statement at the top level other than a definition of a function."""

    text: str
    line: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A branch of a `case`: its patterns and the variables that it assigns."""

    line: int
    patterns: tuple[str, ...]
    assigned: frozenset[str]
    leaves: bool
    """True if the branch ends the script or the function."""


@dataclass(frozen=True, kw_only=True)
class Use(Place):
    """An expansion of a variable, or a test whether it is set."""

    name: str
    guarded: bool = False
    """True if the expansion handles an unset variable: ${x:-y}, ${x:?}, [[ -v x ]]."""
    has_default: bool = False
    """True if the expansion has a default: ${x:-y}, ${x=y}."""
    in_arithmetic: bool = False
    """True within $(( )) and (( )), where an unset variable is 0."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """Everything in a script that the rules check."""

    path: str
    lines: tuple[str, ...]
    directives: tuple[sbatch.Directive, ...]
    commands: tuple[Command, ...] = ()
    statements: tuple[Statement, ...] = ()
    assigned: tuple[Assignment, ...] = ()
    """Every place that sets or declares a variable."""
    exports: tuple[Assignment, ...] = ()
    """Every assignment to an exported variable, whether `export` is on the same line or later."""
    definitions: tuple[Function, ...] = ()
    cases: tuple[tuple[Branch, ...], ...] = ()
    uses: tuple[Use, ...] = ()
    operands: tuple[Use, ...] = ()
    """Variables that $(( )) and (( )) read by their bare names."""
    counts: tuple[Count, ...] = ()
    unset: frozenset[str] = frozenset()
    pipelines: tuple[tuple[Command, ...], ...] = ()
    is_expanded: bool = False
    """True if another script's shell expands the text before sbatch reads it, as in sbatch <<EOF."""
    error: ShellSyntaxError | None = None
    """The syntax error at which bash stops. There are no commands then, unless it is only a placeholder."""
    text_errors: tuple[ShellSyntaxError, ...] = ()
    """The syntax errors in texts of `bash -c`, each with the script's line of the text."""

    @cached_property
    def options(self) -> dict[str, str]:
        """Long names and values of the effective directives. The last one wins."""
        return {item.name: item.value or "" for item in self.directives if item.effective}

    @cached_property
    def assignments(self) -> tuple[Assignment, ...]:
        """Every name=value and name=(items)."""
        return tuple(item for item in self.assigned if item.text)

    @cached_property
    def reads(self) -> tuple[Use, ...]:
        """Every place that reads a variable."""
        return (*self.uses, *self.operands)

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Function -> its last definition, which is in effect."""
        return {function.name: function for function in self.definitions}

    @cached_property
    def called_in(self) -> dict[str, list[Command]]:
        """Function -> commands that call it or take its name as an argument (run_step NAME)."""
        found: dict[str, list[Command]] = {}
        for command in self.commands:
            for word in self.functions.keys() & set(command.written):
                found.setdefault(word, []).append(command)
        return found

    def reachable(self, name: str) -> set[str]:
        """A function and all functions it calls, directly or indirectly."""
        found, new = {name}, [name]
        while new:
            for command in self.calls_of(new.pop()):
                called = (self.functions.keys() & set(command.written)) - found
                found |= called
                new += called
        return found

    def calls_of(self, name: str) -> list[Command]:
        """The commands in the effective definition of a function."""
        function = self.functions.get(name)
        return self._commands_of.get(function.offset, []) if function else []

    @cached_property
    def _commands_of(self) -> dict[int, list[Command]]:
        """Offset of a definition -> the commands in its body."""
        found: dict[int, list[Command]] = {}
        for command in self.commands:
            found.setdefault(command.definition, []).append(command)
        return found

    @cached_property
    def assignments_by_name(self) -> dict[str, list[Assignment]]:
        """Variable -> its assignments, in the order of lines."""
        found: dict[str, list[Assignment]] = {}
        for item in self.assignments:
            found.setdefault(item.name, []).append(item)
        return found

    @cached_property
    def commands_by_function(self) -> dict[str, list[Command]]:
        """Function -> the commands of its body, in the order of the script. "" -> the commands outside functions."""
        found: dict[str, list[Command]] = {}
        for command in self.commands:
            found.setdefault(command.function, []).append(command)
        return found

    @cached_property
    def names_set(self) -> frozenset[str]:
        """Every variable that the script sets, declares, exports or unsets anywhere."""
        found = {item.name for item in self.assigned} | self.unset
        return frozenset(found.union(item.name for command in self.commands for item in command.environment))

    @cached_property
    def arithmetic_names(self) -> frozenset[str]:
        """Variables within $(( )) and (( )), where an unset one is 0."""
        return frozenset(use.name for use in self.reads if use.in_arithmetic)

    @cached_property
    def interpreter(self) -> str:
        """The program on the shebang line, without its directory; "" without a shebang."""
        words = self.lines[0].removeprefix("#!").split() if self.lines[0].startswith("#!") else []
        names = [word.rpartition("/")[2] for word in words]
        if names[:1] == ["env"]:
            # env -S NAME=value bash -e
            names = [name for name in names[1:] if not name.startswith("-") and "=" not in name]
        return names[0] if names else ""

    @property
    def is_shell(self) -> bool:
        """True if the interpreter is a shell, which is also the default."""
        return not self.interpreter or self.interpreter in SHELLS

    @cached_property
    def is_batch(self) -> bool:
        """True if the script has directives."""
        return bool(self.directives)

    def option_line(self, name: str) -> int:
        """The line of a directive, or of the first one, where a comment above can disable rules."""
        lines = [item.line for item in self.directives if item.name == name]
        return lines[-1] if lines else self.first_directive

    @cached_property
    def first_directive(self) -> int:
        """The line of the first directive; 1 without directives."""
        return min((item.line for item in self.directives), default=1)

    def settings(self, name: str) -> list[Assignment]:
        """Every assignment to an exported variable."""
        return [assignment for assignment in self.exports if assignment.name == name]

    @cached_property
    def shell_options(self) -> frozenset[str]:
        """Names of shell options that `set` or the shebang line enable ("errexit", "pipefail", "xtrace").

        Options in a `bash -c` text apply to that shell only.
        """
        switches = [*shebang_switches(self.lines[0])]
        for command in self.commands:
            if command.name == "set" and command.outer is None:
                switches += switched([word.text for word in command.words[1:]])
        return frozenset(name for name, is_on in switches if is_on)

    def enabled(self, option: str) -> Callable[[int], bool]:
        """A function that is True for the lines at which a shell option such as "nounset" applies."""
        switches = [(1, is_on) for name, is_on in shebang_switches(self.lines[0]) if name == option]
        for command in self.commands:
            if command.name == "set" and command.outer is None and not command.conditional:
                texts = [word.text for word in command.words[1:]]
                switches += [(command.line, is_on) for name, is_on in switched(texts) if name == option]
        lines = [line for line, _ in switches]

        def is_enabled(line: int) -> bool:
            index = bisect_left(lines, line) - 1
            return index >= 0 and switches[index][1]

        return is_enabled
