"""Restricts templates to a subset of Jinja, checked when a template is loaded.

Values are written only in #SBATCH lines, comments, and assignments in the blocks `settings` and `environment`. All
other shell code reads shell variables, so that values are quoted in few places.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import NoReturn

from jinja2 import TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame

WITH_VALUES = frozenset(("settings", "environment"))
"""Blocks in which a template can write values as words."""
INSTEAD = {
    "python": '"${task[@]}"',
    "arguments": '"${task[@]}"',
    "container_words": '"${container[@]}"',
    "step_options": '"${step[@]}"',
    "scratch": '"$scratch", or "$scratch_root" for the directory that it is in',
    "required_files": '"${required[@]}"',
    "umask": '"$job_umask"',
    "name": '"$title"',
}
"""Variable of earlier templates -> shell variable that replaces it, if its name differs."""
_ARRAYS = frozenset(
    (
        "container",
        "step",
        "task",
        "secrets",
        "required",
        "directories",
        "striped_directories",
        "stripe",
        "modules",
        "node_expectations",
        "health_command",
    )
)
_STATEMENTS = (nodes.Output, nodes.If, nodes.For, nodes.Block, nodes.Extends, nodes.Include, nodes.Assign)
_LOGIC = (
    *(nodes.Name, nodes.Const, nodes.Getattr, nodes.Getitem, nodes.List, nodes.Tuple),
    *(nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Test, nodes.CondExpr),
)
_PLAIN = r"[\w@%+:,./=-]"
_BEFORE_WORD = re.compile(
    rf"(?:(?:export|declare(?: -\w+)*|local) +)?(?:\w+\+?=\((?:{_PLAIN}| )*|(?:\w+\+?=)?{_PLAIN}*)"
)
"""Text on a line before a value: part of an assignment, or of a word in an array with one word per line."""

_IN_COMMENT = re.compile(r"#|[^'\"\\#]*\s#")
"""Text on a line before a value in a comment. Nothing before the `#` is quoted."""


class CheckingCodeGenerator(CodeGenerator):
    """Jinja's compiler with the check, through which every template passes once when it is loaded."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802
        """Checks the template, then compiles it."""
        check = _TemplateCheck(self.name, self.filename)
        if any(isinstance(each, nodes.Extends) for each in node.body):
            check.require_blocks_only(node.body)
        check.body(node.body, "")
        super().visit_Template(node, frame)


class _TemplateCheck:
    """Checks one template in the order of its text."""

    def __init__(self, name: str | None, filename: str | None) -> None:
        self._name = name
        self._filename = filename
        self._before = ""
        """The text since the last newline."""
        self._quote = ""
        """The open quote, which can continue across lines; "" if none."""

    def require_blocks_only(self, body: Iterable[nodes.Node]) -> None:
        """Refuses text outside blocks in a template that extends another. Jinja silently drops it."""
        for node in body:
            is_blank = isinstance(node, nodes.Output) and all(
                isinstance(child, nodes.TemplateData) and not child.data.strip() for child in node.nodes
            )
            if not is_blank and not isinstance(node, nodes.Extends | nodes.Block | nodes.Assign):
                self._refuse(
                    "Jinja drops this text, because the template extends another; move it into a block", node
                )

    def body(self, body: Iterable[nodes.Node], block: str) -> None:
        """Checks statements. `block` is the innermost block around them."""
        for node in body:
            if not isinstance(node, _STATEMENTS):
                self._refuse(
                    f"{type(node).__name__} is not allowed in a template; use if, for, set and blocks", node
                )
            if isinstance(node, nodes.Output):
                for child in node.nodes:
                    self._output(child, block)
                continue
            if isinstance(node, nodes.If):
                self._logic_below(node.test)
                self.body(node.body, block)
                for branch in node.elif_:  # each is an If of its own
                    self.body([branch], block)
                self.body(node.else_, block)
            elif isinstance(node, nodes.For):
                pairs = (
                    node.iter.node
                    if isinstance(node.iter, nodes.Filter) and node.iter.name == "items"
                    else None
                )
                self._logic_below(pairs or node.iter)
                self.body([*node.body, *node.else_], block)
            elif isinstance(node, nodes.Block):
                self.body(node.body, node.name)
                if self._quote and node.name in WITH_VALUES:
                    self._refuse(
                        f"a quote ({self._quote}) is not closed at the end of block {node.name}", node
                    )
            elif isinstance(node, nodes.Assign):
                self._logic_below(node.node)
            elif isinstance(node, nodes.Extends | nodes.Include) and not isinstance(
                node.template, nodes.Const
            ):
                self._refuse("write the name of the template as a literal string", node)

    def _output(self, node: nodes.Node, block: str) -> None:
        if isinstance(node, nodes.TemplateData):
            self._text(node.data)
            if block not in WITH_VALUES:
                self._quote = ""  # no value may follow, so it does not matter what is quoted
            return
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "super":
            return  # this text is checked in its own template
        filter_name = node.name if isinstance(node, nodes.Filter) else ""
        self._logic_below(node.node if isinstance(node, nodes.Filter) else node)
        line = self._before.lstrip()
        self._before += "x"  # in place of the value, for what follows on the line
        if filter_name == "heredoc" and not self._quote:
            return
        if line.startswith("#SBATCH"):
            if filter_name != "directive":
                self._refuse("write a value of a #SBATCH line as {{ value | directive }}", node)
        elif _IN_COMMENT.match(line) and not self._quote:
            if filter_name != "comment":
                self._refuse("write a value in a comment as {{ value | comment }}", node)
        elif block not in WITH_VALUES:
            self._refuse(f"a value is outside of blocks settings and environment; {_instead(node)}", node)
        elif self._quote or not _BEFORE_WORD.fullmatch(line):
            self._refuse(
                "values are quoted automatically; write this one as a separate word, NAME={{ value }}", node
            )
        elif filter_name not in ("", "variable", "assignment"):
            self._refuse(f"filter {filter_name} is not allowed here; write {{{{ value }}}}", node)
        elif filter_name == "assignment" and line:
            self._refuse("an assignment must be at the start of its line", node)

    def _text(self, text: str) -> None:
        for line in io.StringIO(text):  # only a newline ends a comment
            is_comment = not self._quote and (self._before + line).lstrip().startswith("#")
            self._before = "" if line.endswith("\n") else self._before + line
            if is_comment:
                continue
            for found in re.finditer(r"\\.|['\"]|(?<=\s)#", line):
                if found[0] == self._quote:
                    self._quote = ""
                elif not self._quote and found[0] == "#":
                    break
                elif not self._quote and found[0] in "'\"":
                    self._quote = found[0]

    def _logic_below(self, node: nodes.Node | None) -> None:
        if node is None:
            return
        self._logic(node)
        for child in node.find_all(nodes.Expr):
            self._logic(child)

    def _logic(self, node: nodes.Node) -> None:
        if not isinstance(node, _LOGIC):
            reason = (
                f"{type(node).__name__} is not allowed in an expression, because templates compute nothing"
            )
            self._refuse(reason, node)

    def _refuse(self, reason: str, node: nodes.Node) -> NoReturn:
        raise TemplateSyntaxError(reason, node.lineno or 1, self._name, self._filename)


def _instead(node: nodes.Node) -> str:
    """The advice to read a shell variable instead of a value."""
    found = node if isinstance(node, nodes.Name) else node.find(nodes.Name)
    if found is None:
        return "write it as shell code"
    name = found.name
    variable = INSTEAD.get(name, f'"${{{name}[@]}}"' if name in _ARRAYS else f'"${name}"')
    return f"read the shell variable {variable}"
