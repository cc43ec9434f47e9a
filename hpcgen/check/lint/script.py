"""A batch script as plain values: directives, assignments, commands with their arguments, functions, traps.

What a word is stays unknown unless the script itself says it; `hpcgen.check.lint.reader` makes these values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from hpcgen.check.lint import sbatch
from hpcgen.check.lint.arithmetic import Interval
from hpcgen.check.lint.syntax import ShellSyntaxError
from hpcgen.check.lint.words import Word

SHELLS = frozenset(("bash", "sh", "dash", "ash", "ksh", "mksh", "zsh", "busybox"))
"""Interpreters whose scripts are read as bash."""

Status = Literal["plain", "tested", "ignored", "piped", "substituted"]
"""What becomes of a command's exit status: nothing looks at it, something does, `|| true` throws it away, the
next command of a pipe hides it, or the command is within $( )."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """name=value, or name=(items); `exported` when commands see it."""

    name: str
    line: int
    value: Word | None = None
    items: tuple[Word, ...] | None = None
    exported: bool = False
    append: bool = False
    conditional: bool = False
    function: str = ""
    outer: int | None = None
    """Index in `Script.commands` of the command whose `bash -c` text the assignment is from."""
    interval: Interval | None = None
    """What an arithmetic value can be."""
    dead: bool = False
    """Whether it stands in a branch that certainly does not run."""
    loop: str = ""
    """Variable of the `for` that runs it in every turn; "" outside of one."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A simple command; `line` to `end` are the lines it is written on."""

    words: tuple[Word, ...]
    line: int
    end: int
    environment: tuple[Assignment, ...] = ()
    """What NAME=value before the command sets for it alone."""
    background: bool = False
    status: Status = "plain"
    function: str = ""
    """The function in whose body it stands; "" outside."""
    conditional: bool = False
    in_loop: bool = False
    here_document: str = ""
    """What it reads from <<EOF, with variables as written."""
    here_line: int = 0
    """The first line of that."""
    here_expands: bool = False
    """Whether the shell expands variables in it, because its delimiter has no quotes."""
    outer: int | None = None
    """Where in `Script.commands` the command is whose `bash -c` text this one is from."""
    statement: int = 0
    """Number of the statement of the script that it belongs to; statements of a body count as their own."""
    dead: bool = False
    """Whether it stands in a branch that certainly does not run."""

    @property
    def name(self) -> str:
        """The program's name without its directory."""
        return self.words[0].text.rpartition("/")[2] if self.words else ""


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function; one that runs its own arguments is a wrapper around a command."""

    name: str
    line: int
    runs_arguments: bool = False
    in_background: bool = False


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One branch of a case: its patterns, and the names that it sets."""

    line: int
    patterns: tuple[str, ...]
    assigned: frozenset[str]
    leaves: bool
    """Whether it ends the script or the function."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """A variable that is expanded somewhere."""

    name: str
    line: int
    guarded: bool = False
    """Whether it says what to do when the variable is not set: ${x:-y}, ${x:?}."""
    has_default: bool = False
    """Whether that is a default: ${x:-y}, ${x=y}."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """Everything that the rules look at."""

    path: str
    lines: tuple[str, ...]
    directives: tuple[sbatch.Directive, ...]
    commands: tuple[Command, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    exports: tuple[Assignment, ...] = ()
    """Every assignment that commands see, whether `export` stands before it or comes later."""
    functions: dict[str, Function] = field(default_factory=dict)
    cases: tuple[tuple[Branch, ...], ...] = ()
    uses: tuple[Use, ...] = ()
    unset: frozenset[str] = frozenset()
    pipelines: tuple[tuple[Command, ...], ...] = ()
    arithmetic: tuple[Use, ...] = ()
    """Variables within $(( )) and (( ))."""
    is_expanded: bool = False
    """Whether another script's shell expands the text before sbatch reads it, as in sbatch <<EOF."""
    error: ShellSyntaxError | None = None
    """Where bash would stop reading. There are no commands then, unless only a placeholder is in the way."""

    @cached_property
    def options(self) -> dict[str, str]:
        """Long names and values of the directives in effect; the last one wins."""
        return {item.name: item.value or "" for item in self.directives if item.effective}

    @cached_property
    def interpreter(self) -> str:
        """The program that the first line names, without its directory; "" when it names none."""
        words = self.lines[0].removeprefix("#!").split() if self.lines[0].startswith("#!") else []
        names = [word.rpartition("/")[2] for word in words]
        if names[:1] == ["env"]:
            # env -S NAME=value bash -e
            names = [name for name in names[1:] if not name.startswith("-") and "=" not in name]
        return names[0] if names else ""

    @property
    def is_shell(self) -> bool:
        """Whether a shell runs it, as far as the first line tells."""
        return not self.interpreter or self.interpreter in SHELLS

    @cached_property
    def is_batch(self) -> bool:
        """Whether it is meant for sbatch."""
        return bool(self.directives)

    def option_line(self, name: str) -> int:
        """Where a directive stands, else the first directive: a comment above it can say what to ignore."""
        lines = [item.line for item in self.directives if item.name == name]
        return lines[-1] if lines else self.first_directive

    @cached_property
    def first_directive(self) -> int:
        """The line of the first directive; 1 without any."""
        return min((item.line for item in self.directives), default=1)

    def settings(self, name: str) -> list[Assignment]:
        """Every assignment that gives commands this environment variable."""
        return [assignment for assignment in self.exports if assignment.name == name]

    @cached_property
    def shell_options(self) -> frozenset[str]:
        """Names of options that `set` or the first line turn on ("errexit", "pipefail", "xtrace")."""
        short = {"e": "errexit", "x": "xtrace", "u": "nounset", "a": "allexport"}
        found = set()
        if self.lines and (shebang := re.match(r"#!\s*\S*sh\b.*?\s-(\w+)", self.lines[0])):
            found |= {short[letter] for letter in shebang[1] if letter in short}
        for command in self.commands:
            if command.name != "set":
                continue
            texts = [word.text for word in command.words[1:]]
            for text, following in zip(texts, [*texts[1:], ""], strict=True):
                if text.startswith("-") and not text.startswith("--"):
                    found |= {short[letter] for letter in text[1:] if letter in short}
                    if text.endswith("o"):
                        found.add(following)
        return frozenset(found)
