"""Collects what is found in a script, and builds the `Script`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hpcgen.check.lint.script import Assignment, Branch, Command, Function, Script, Use
from hpcgen.check.lint.syntax import ShellSyntaxError


@dataclass
class Collected:
    """The fields of a `Script`, filled as its statements are read."""

    commands: list[Command] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    functions: dict[str, Function] = field(default_factory=dict)
    cases: list[tuple[Branch, ...]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    arithmetic: list[Use] = field(default_factory=list)
    unset: set[str] = field(default_factory=set)
    pipelines: list[tuple[Command, ...]] = field(default_factory=list)
    exported: set[str] = field(default_factory=set)
    """Names that `export NAME` exports."""
    here_lines: set[int] = field(default_factory=set)
    """Lines within here-documents. Directives there are not the script's."""
    error: ShellSyntaxError | None = None
    text_errors: list[ShellSyntaxError] = field(default_factory=list)

    def add_function(self, name: str, line: int, body: list[Command]) -> None:
        """Adds a function with the commands that were read from its body."""
        own = [command for command in body if command.function == name]
        runners = [
            command
            for command in own
            if command.words and command.words[0].source in ('"$@"', "$@", '"${@}"')
        ]
        self.functions[name] = Function(
            name=name,
            line=line,
            in_background=any(command.background for command in runners),
        )

    def added_to(self, script: Script) -> Script:
        """The script with everything that was found in it."""
        exports = [item for item in self.assignments if item.exported or item.name in self.exported]
        directives = [item for item in script.directives if item.line not in self.here_lines]
        return replace(
            script,
            directives=tuple(directives),
            commands=tuple(self.commands),
            assignments=tuple(self.assignments),
            exports=tuple(replace(item, exported=True) for item in exports),
            functions=self.functions,
            cases=tuple(self.cases),
            uses=tuple(self.uses),
            arithmetic=tuple(self.arithmetic),
            unset=frozenset(self.unset),
            pipelines=tuple(self.pipelines),
            error=self.error,
            text_errors=tuple(self.text_errors),
        )
