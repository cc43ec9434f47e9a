"""Facts about a script that the walker has collected so far."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hpcgen.check.lint.script import Assignment, Branch, Command, Count, Function, Script, Statement, Use
from hpcgen.check.lint.syntax import ShellSyntaxError


@dataclass
class Found:
    """The fields of `Script` that the walker fills, in the order of the script."""

    commands: list[Command] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    assigned: list[Assignment] = field(default_factory=list)
    definitions: list[Function] = field(default_factory=list)
    cases: list[tuple[Branch, ...]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    operands: list[Use] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    pipelines: list[tuple[Command, ...]] = field(default_factory=list)
    unset: set[str] = field(default_factory=set)
    exported: set[str] = field(default_factory=set)
    """Variables that the script exports anywhere."""
    here_lines: set[int] = field(default_factory=set)
    """Lines of here-documents, in which #SBATCH is text."""
    error: ShellSyntaxError | None = None
    text_errors: list[ShellSyntaxError] = field(default_factory=list)

    def added_to(self, script: Script) -> Script:
        """The script with everything that was found in it. Directives within here-documents are not the script's."""
        exports = [
            item for item in self.assigned if item.text and (item.exported or item.name in self.exported)
        ]
        return replace(
            script,
            directives=tuple(item for item in script.directives if item.line not in self.here_lines),
            commands=tuple(self.commands),
            statements=tuple(self.statements),
            assigned=tuple(self.assigned),
            exports=tuple(replace(item, exported=True) for item in exports),
            definitions=tuple(sorted(self.definitions, key=lambda function: function.offset)),
            cases=tuple(self.cases),
            uses=tuple(self.uses),
            operands=tuple(self.operands),
            counts=tuple(self.counts),
            unset=frozenset(self.unset),
            pipelines=tuple(self.pipelines),
            error=self.error,
            text_errors=tuple(self.text_errors),
        )
