"""A batch script as plain data: directives, assignments, commands with arguments, functions.

Words are unknown unless the script itself determines them. `hpcgen.check.lint.walker` makes these values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from hpcgen.check.lint import sbatch
from hpcgen.check.lint.syntax import ShellSyntaxError
from hpcgen.check.lint.words import Ranges, Word, joined

SHELLS = frozenset(("bash", "sh", "dash", "ash", "ksh", "mksh", "zsh", "busybox"))
"""Interpreters whose scripts are read as bash."""

_LETTERS = {"a": "allexport", "e": "errexit", "u": "nounset", "v": "verbose", "x": "xtrace"}
"""Short names of shell options -> their long names."""

_SETTERS = frozenset((
    "read", "mapfile", "readarray", "getopts", "local", "declare", "typeset", "readonly", "export", "printf", "let",
    "unset",
))  # fmt: skip
"""Builtins that name variables in their arguments."""
_OTHER_ASSIGNMENTS = re.compile(r"(?:\b(?:for|select|coproc)\s+|\bfor\s*\(\(\s*|\(\(\s*)([A-Za-z_]\w*)")
"""Variables of loops and of (( NAME = 1 ))."""

Status = Literal["plain", "tested", "ignored", "piped", "substituted"]
"""The use of a command's exit status: nothing reads it, something does, `|| true` discards it, the next command of a
pipe hides it, or the command is within $( )."""


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
class Assignment:
    """name=value or name=(items)."""

    name: str
    line: int
    value: Word | None = None
    items: tuple[Word, ...] | None = None
    exported: bool = False
    append: bool = False
    conditional: bool = False
    function: str = ""
    outer: int | None = None
    """Index in `Script.commands` of the command whose `bash -c` text contains the assignment."""
    dead: bool = False
    """True if it is in a branch that certainly does not run."""
    loop: str = ""
    """Variable of the `for` that runs it in every iteration; "" if there is none."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A simple command on the lines from `line` to `end`."""

    words: tuple[Word, ...]
    line: int
    end: int
    environment: tuple[Assignment, ...] = ()
    """NAME=value before the command, which only apply to it."""
    background: bool = False
    status: Status = "plain"
    function: str = ""
    """The function whose body contains it; "" if there is none."""
    conditional: bool = False
    in_loop: bool = False
    loop: str = ""
    """Variable of the `for` that runs it in every iteration; "" if there is none."""
    here_document: str = ""
    """Text of its <<EOF, with variables as written."""
    here_line: int = 0
    """First line of the here-document."""
    here_expands: bool = False
    """True if the shell expands variables in the here-document, because its delimiter has no quotes."""
    redirections: tuple[str, ...] = ()
    """Redirections as written, such as "> log" and "<<EOF"."""
    around: tuple[str, ...] = ()
    """Redirections of the groups, loops and conditions that contain it."""
    here_expanded: Ranges = ()
    """Where it expands something."""
    writes_to: Word | None = None
    """The file that its output replaces."""
    file_text: Word | None = None
    """The text of the shell script that it runs, if a here-document of the script has written the file."""
    file_arguments: tuple[Word, ...] = ()
    """The arguments of that script."""
    outer: int | None = None
    """Index in `Script.commands` of the command whose `bash -c` text contains this one."""
    statement: int = 0
    """Number of its statement. Statements within a body have their own numbers."""
    dead: bool = False
    """True if it is in a branch that certainly does not run."""

    @property
    def name(self) -> str:
        """The program's name without its directory."""
        return self.words[0].text.rpartition("/")[2] if self.words else ""

    @property
    def evaluated_text(self) -> Word | None:
        """The text that `eval` runs; None for another command, or if only the job knows which program it starts."""
        words = self.words[1:]
        if self.name != "eval" or not words or words[0].text.startswith(("$", "`")):
            return None
        return joined(words)

    @cached_property
    def shell_text(self) -> Word | None:
        """The text that the command passes to `bash -c`; None without one."""
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
class Function:
    """A function of the script."""

    name: str
    line: int
    in_background: bool = False
    """True if it runs its arguments as a command in the background."""


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A branch of a `case`: its patterns and the variables that it assigns."""

    line: int
    patterns: tuple[str, ...]
    assigned: frozenset[str]
    leaves: bool
    """True if the branch ends the script or the function."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """An expansion of a variable."""

    name: str
    line: int
    guarded: bool = False
    """True if it handles an unset variable: ${x:-y}, ${x:?}."""
    has_default: bool = False
    """True if it has a default: ${x:-y}, ${x=y}."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """Everything in a script that the rules check."""

    path: str
    lines: tuple[str, ...]
    directives: tuple[sbatch.Directive, ...]
    commands: tuple[Command, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    exports: tuple[Assignment, ...] = ()
    """Every assignment to an exported variable, whether `export` is on it or later."""
    functions: dict[str, Function] = field(default_factory=dict)
    cases: tuple[tuple[Branch, ...], ...] = ()
    uses: tuple[Use, ...] = ()
    unset: frozenset[str] = frozenset()
    pipelines: tuple[tuple[Command, ...], ...] = ()
    arithmetic: tuple[Use, ...] = ()
    """Variables within $(( )) and (( ))."""
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
    def assignments_by_name(self) -> dict[str, list[Assignment]]:
        """Variable -> its assignments, in the order of lines."""
        found: dict[str, list[Assignment]] = {}
        for item in self.assignments:
            found.setdefault(item.name, []).append(item)
        return found

    @cached_property
    def names_set(self) -> frozenset[str]:
        """Every variable that the script sets or exports anywhere: by assignments, loops, `read` and arithmetic."""
        found = set(self.assignments_by_name)
        for command in self.commands:
            found |= {item.name for item in command.environment}
            if command.name in _SETTERS:
                found |= {re.split(r"[=\[+]", word.text)[0] for word in command.words[1:]}
        text = "\n".join(line for line in self.lines if not line.lstrip().startswith("#"))
        return frozenset(found | set(_OTHER_ASSIGNMENTS.findall(text)))

    @cached_property
    def arithmetic_names(self) -> frozenset[str]:
        """Variables within $(( )) and (( )), where an unset one is 0."""
        return frozenset(use.name for use in self.arithmetic)

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

        Those of a `bash -c` text apply to that shell only.
        """
        switches = [*shebang_switches(self.lines[0])]
        for command in self.commands:
            if command.name == "set" and command.outer is None:
                switches += switched([word.text for word in command.words[1:]])
        return frozenset(name for name, is_on in switches if is_on)
