"""What a template may say; everything else that Jinja offers is refused when a template is loaded.

Quoting by default protects `{{ value }}` between words. It does not hold where text is joined to text that is
already quoted (`~`, `+`, `%`, format, join, slices), nor in a place with other rules (quotes, comments,
#SBATCH lines); so neither exists in a template. Its logic is `if`, `for`, `set`, macros, blocks and includes:
what is to be computed is computed in the plan.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypeAlias

from jinja2 import TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame

from hpcgen.rendering.filters import LOGIC_FILTERS, OUTPUT_FILTERS
from hpcgen.rendering.shell_reader import LINE_START, UNKNOWN, ShellError, ShellReader

_LOGIC = (
    *(nodes.Name, nodes.Const, nodes.Getattr, nodes.Getitem, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair),
    *(
        nodes.Compare,
        nodes.Operand,
        nodes.And,
        nodes.Or,
        nodes.Not,
        nodes.Test,
        nodes.CondExpr,
        nodes.Keyword,
    ),
)
# What may stand beside the blocks of a template that extends another; its other text is never written.
_BESIDE_BLOCKS = (nodes.Extends, nodes.Block, nodes.Macro, nodes.Import, nodes.FromImport, nodes.Assign)
_Reference: TypeAlias = nodes.Extends | nodes.Include | nodes.Import | nodes.FromImport
_INSTEAD: dict[type[nodes.Node], str] = {
    nodes.Concat: "~ joins text past the quoting; write the parts side by side: {{ a }}{{ b }}",
    nodes.Slice: "a slice could cut a quoted word apart; compute the part in the plan",
    nodes.FilterBlock: "{% filter %} changes text that is already quoted; use a filter in {{ }}",
    nodes.ScopedEvalContextModifier: "{% autoescape %} switches the quoting off; use | raw for shell code",
    nodes.Extends: "{% extends %} within another statement; it stands alone, before everything else",
    nodes.NSRef: "an attribute cannot be set; use {% set name = value %}",
}


class CheckingCodeGenerator(CodeGenerator):
    """Jinja's compiler behind the check: every template passes here once, when it is loaded."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802
        """Check the template, then compile it."""
        TemplateCheck(node, self.name, self.filename).run()
        super().visit_Template(node, frame)


class TemplateCheck:
    """Walks one template in the order of its text, with a `ShellReader` that knows the place in the shell."""

    def __init__(self, template: nodes.Template, name: str | None, filename: str | None) -> None:
        self._template = template
        self._name = name
        self._filename = filename
        self._imports = {node.target for node in template.find_all(nodes.Import)}
        self._macros = {"super", "caller", *(node.name for node in template.find_all(nodes.Macro))}
        for node in template.find_all(nodes.FromImport):
            self._macros.update(name if isinstance(name, str) else name[1] for name in node.names)
        self._statements: dict[type[nodes.Node], Callable[..., ShellReader]] = {
            nodes.Output: self._output,
            nodes.If: self._if,
            nodes.For: self._for,
            nodes.Block: self._block,
            nodes.Macro: self._macro,
            nodes.CallBlock: self._call_block,
            nodes.With: self._with,
            nodes.Include: self._include,
            nodes.Import: self._import,
            nodes.FromImport: self._import,
            nodes.Assign: self._assign,
            nodes.AssignBlock: self._assign_block,
        }

    def run(self) -> None:
        """Raise TemplateSyntaxError, with file and line, for the first thing that a template may not say."""
        body = self._template.body
        parent = next((node for node in body if isinstance(node, nodes.Extends)), None)
        if parent:
            self._require_constant_name(parent)
            self._require_blocks_only(body)
            for node in body:
                if not isinstance(node, (nodes.Extends, nodes.Output)):
                    self._statement(node, ShellReader())
            return
        shell = self._body(body, ShellReader())
        self._end(shell, _last_line(body))
        if shell.last != LINE_START:
            self._refuse("the template ends in the middle of a line; end it with a newline", _last_line(body))

    def _refuse(self, reason: str, lineno: int) -> NoReturn:
        raise TemplateSyntaxError(reason, lineno, self._name, self._filename)

    # Statements: each takes the shell's state before it and gives the state after it.

    def _body(self, body: Iterable[nodes.Node], shell: ShellReader) -> ShellReader:
        for node in body:
            shell = self._statement(node, shell)
        return shell

    def _statement(self, node: nodes.Node, shell: ShellReader) -> ShellReader:
        check = self._statements.get(type(node))
        if check is None:
            self._refuse_node(node)
        return check(node, shell)

    def _output(self, node: nodes.Output, shell: ShellReader) -> ShellReader:
        for child in node.nodes:
            if isinstance(child, nodes.TemplateData):  # noqa: SIM108  # as a ternary it is longer than a line
                shell = self._text(child, shell)
            else:
                shell = self._value(child, shell)
        return shell

    def _text(self, text: nodes.TemplateData, shell: ShellReader) -> ShellReader:
        after = shell.copy()
        for offset, line in enumerate(re.split(r"(?<=\n)", text.data)):
            try:
                after.feed(line)
            except ShellError as error:
                self._refuse(str(error), text.lineno + offset)
        return after

    def _value(self, value: nodes.Expr, shell: ShellReader) -> ShellReader:
        branches = []
        for filter_name in self._output_filters(value):
            after = shell.copy()
            try:
                after.value(filter_name)
            except ShellError as error:
                self._refuse(str(error), value.lineno)
            branches.append(after)
        return functools.reduce(functools.partial(self._join, value), branches)

    def _output_filters(self, value: nodes.Expr) -> list[str]:
        """The filter that writes the value, for each branch of a conditional expression."""
        if isinstance(value, nodes.CondExpr):
            self._logic(value.test)
            otherwise = self._output_filters(value.expr2) if value.expr2 else []
            return [*self._output_filters(value.expr1), *otherwise]
        if isinstance(value, nodes.Filter) and value.name in OUTPUT_FILTERS:
            self._require_plain_filter(value)
            assert value.node is not None
            self._logic(value.node)
            return [value.name]
        self._logic(value)
        return [_kind(value)]

    def _if(self, node: nodes.If, shell: ShellReader) -> ShellReader:
        self._logic(node.test)
        after = self._body(node.body, shell)
        for branch in node.elif_:
            self._logic(branch.test)
            after = self._join(node, after, self._body(branch.body, shell))
        return self._join(node, after, self._body(node.else_, shell))

    def _for(self, node: nodes.For, shell: ShellReader) -> ShellReader:
        if node.recursive:
            self._refuse("a recursive loop; use nested loops", node.lineno)
        self._logic(node.iter)
        if node.test:
            self._logic(node.test)
        again = self._join(node, shell, self._body(node.body, shell))
        # The second turn begins where the first ends.
        after = self._join(node, again, self._body(node.body, again))
        return self._join(node, after, self._body(node.else_, shell)) if node.else_ else after

    def _join(self, node: nodes.Node, one: ShellReader, other: ShellReader) -> ShellReader:
        try:
            return one.join(other)
        except ShellError as error:
            self._refuse(f"{type(node).__name__.lower()}: {error}", node.lineno)

    def _block(self, node: nodes.Block, shell: ShellReader) -> ShellReader:
        self._require_line_start(node, shell)
        inside = self._body(node.body, ShellReader())
        self._end(inside, _last_line(node.body) or node.lineno)
        if inside.last != LINE_START:
            self._refuse(f"block {node.name} ends in the middle of a line; it holds whole lines", node.lineno)
        return shell

    def _macro(self, node: nodes.Macro, shell: ShellReader) -> ShellReader:
        for default in node.defaults:
            self._logic(default)
        self._text_of_its_own(node)
        return shell

    def _call_block(self, node: nodes.CallBlock, shell: ShellReader) -> ShellReader:
        for default in node.defaults:
            self._logic(default)
        self._text_of_its_own(node)
        return self._value(node.call, shell)

    def _assign_block(self, node: nodes.AssignBlock, shell: ShellReader) -> ShellReader:
        if node.filter:
            self._refuse("a filter on {% set %} text; use it in {{ }}", node.lineno)
        self._logic(node.target)
        self._text_of_its_own(node)
        return shell

    def _text_of_its_own(self, node: nodes.Macro | nodes.CallBlock | nodes.AssignBlock) -> None:
        """Text that is written somewhere else, perhaps in the middle of a word."""
        self._end(self._body(node.body, ShellReader(last=UNKNOWN)), _last_line(node.body) or node.lineno)

    def _with(self, node: nodes.With, shell: ShellReader) -> ShellReader:
        for value in node.values:
            self._logic(value)
        return self._body(node.body, shell)

    def _include(self, node: nodes.Include, shell: ShellReader) -> ShellReader:
        self._require_constant_name(node)
        self._require_line_start(node, shell)
        return shell

    def _import(self, node: nodes.Import | nodes.FromImport, shell: ShellReader) -> ShellReader:
        self._require_constant_name(node)
        return shell

    def _assign(self, node: nodes.Assign, shell: ShellReader) -> ShellReader:
        self._logic(node.target)
        self._logic(node.node)
        return shell

    # What several of them need.

    def _logic(self, expression: nodes.Node) -> None:
        """An expression that joins no text: names, attributes, comparisons, literals, calls of macros."""
        if isinstance(expression, nodes.Call):
            self._require_macro(expression)
            arguments: Iterable[nodes.Node] = (*expression.args, *expression.kwargs)
        elif isinstance(expression, nodes.Filter):
            if expression.name not in LOGIC_FILTERS:
                self._refuse_filter(expression)
            self._require_plain_filter(expression)
            arguments = expression.iter_child_nodes()
        elif isinstance(expression, _LOGIC):
            arguments = expression.iter_child_nodes()
        else:
            self._refuse_node(expression)
        for argument in arguments:
            self._logic(argument)

    def _require_macro(self, call: nodes.Call) -> None:
        target = call.node
        if call.dyn_args or call.dyn_kwargs:
            self._refuse("* and ** in a call; name the arguments", call.lineno)
        if isinstance(target, nodes.Name) and target.name in self._macros:
            return
        if isinstance(target, nodes.Getattr) and isinstance(target.node, nodes.Name):
            owner = target.node.name
            if owner == "self" or owner in self._imports:
                return
        self._refuse(
            "only macros, super(), caller() and self.block() can be called; compute other values in the plan",
            call.lineno,
        )

    def _require_plain_filter(self, value: nodes.Filter) -> None:
        if value.args or value.kwargs or value.dyn_args or value.dyn_kwargs:
            self._refuse(f"the filter {value.name} takes no arguments", value.lineno)

    def _refuse_filter(self, value: nodes.Filter) -> NoReturn:
        if value.name in OUTPUT_FILTERS:
            self._refuse(
                f"| {value.name} is the last thing in {{{{ }}}}, and used nowhere else", value.lineno
            )
        known = ", ".join(sorted({**OUTPUT_FILTERS, **LOGIC_FILTERS}))
        self._refuse(f"there is no filter {value.name}; the filters are {known}", value.lineno)

    def _refuse_node(self, node: nodes.Node) -> NoReturn:
        if isinstance(node, (nodes.BinExpr, nodes.UnaryExpr)):
            self._refuse("arithmetic in a template; compute the value in the plan", node.lineno)
        if isinstance(node, nodes.Scope):  # the wrapping of {% autoescape %}, which has no line of its own
            node = node.body[0]
        kind = type(node)
        self._refuse(_INSTEAD.get(kind, f"{kind.__name__} is not a part of hpcgen's templates"), node.lineno)

    def _require_constant_name(
        self, node: nodes.Extends | nodes.Include | nodes.Import | nodes.FromImport
    ) -> None:
        if not (isinstance(node.template, nodes.Const) and isinstance(node.template.value, str)):
            self._refuse("another template is named by one literal text: the header lists it", node.lineno)

    def _require_line_start(self, node: nodes.Block | nodes.Include, shell: ShellReader) -> None:
        if not shell.at_line_start:
            kind = type(node).__name__.lower()
            self._refuse(f"{{% {kind} %}} holds whole lines of code; give it lines of its own", node.lineno)

    def _require_blocks_only(self, body: Sequence[nodes.Node]) -> None:
        for node in body:
            blank = isinstance(node, nodes.Output) and all(
                isinstance(child, nodes.TemplateData) and not child.data.strip() for child in node.nodes
            )
            if not (blank or isinstance(node, (*_BESIDE_BLOCKS, nodes.AssignBlock))):
                self._refuse(
                    "never written, as the template extends another; put it into a block", node.lineno
                )

    def _end(self, shell: ShellReader, lineno: int) -> None:
        try:
            shell.finish()
        except ShellError as error:
            self._refuse(str(error), lineno)


def _kind(value: nodes.Expr) -> str:
    """How `ShellReader.value` calls what is written without a filter."""
    if not isinstance(value, nodes.Call):
        return ""
    if isinstance(value.node, nodes.Getattr):
        return (
            "block"
            if isinstance(value.node.node, nodes.Name) and value.node.node.name == "self"
            else "markup"
        )
    return "block" if isinstance(value.node, nodes.Name) and value.node.name == "super" else "markup"


def _last_line(body: Sequence[nodes.Node]) -> int:
    """The line where the last statement or text of the body begins; 1 for an empty template."""
    return body[-1].lineno if body else 1
