"""The sandbox of chat templates: Jinja's own, with the functions of transformers and limits for time and memory.

Nothing of a template is computed while it is compiled, where no limit applies. Each filter, call and operation is
checked by the functions of trainer.chats.limits.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from trainer.chats.limits import Budget, percent_size, require_result, require_size, size_of

_MAX_PRODUCT = 1_000_000
_MAX_PRECISION = 1000
_MAX_INDENT = 64
_LONG_SEPARATOR = 256
_COUNTED, _LIMITED, _CONCATENATED = "<counted>", "<limited>", "<concatenated>"
"""Filters that `Sandbox.compiled` adds. No template can name them."""
_WITHOUT = (
    "batch", "center", "filesizeformat", "lipsum", "pprint", "random", "slice", "striptags", "urlize", "wordcount",
    "wordwrap", "xmlattr",
)  # fmt: skip
"""Filters and functions of Jinja for web pages, or with another text each time. No chat template uses them."""


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment with the settings of transformers' apply_chat_template. Jinja itself limits `range`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, extension: type[Extension], strftime_now: Callable[[str], str]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[extension, loopcontrols],
            optimized=False,
            finalize=self._written,
        )
        self.budget = Budget()
        self.filters.update(tojson=_tojson, round=_rounded, sum=_sum)
        for name in _WITHOUT:
            self.filters.pop(name, None)
            self.globals.pop(name, None)
        self.filters = {name: self._guarded(name, function) for name, function in self.filters.items()}
        self.filters[_COUNTED] = lambda items: _Counted(items, self.budget)
        self.filters[_LIMITED] = self.budget.made
        self.filters[_CONCATENATED] = self._concatenated
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = strftime_now
        self.globals["dict"] = _Dictionary()
        self.globals["namespace"] = _Namespace

    def compiled(self, source: str) -> jinja2.Template:
        """Compile a template whose loops, assignments and texts are checked.

        Raises:
            TemplateSyntaxError: it is not valid Jinja.
        """
        return self.from_string(_Limits().visit(self.parse(source)))

    def rendered(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """The text that a compiled template writes.

        Raises:
            SecurityError: the template does what is forbidden, or makes or writes a value that is too large.
            ExhaustedError: it takes too long.
        """
        self.budget.start()
        parts, size = list[str](), 0
        for part in template.generate(variables):
            parts.append(part)
            size += len(part)
            require_size(size)
        return "".join(parts)

    def call(self, context: jinja2.runtime.Context, function: Any, /, *arguments: Any, **named: Any) -> Any:
        """Call a function or a macro.

        Raises:
            SecurityError: it is not safe, or an argument or the result is too large.
            ExhaustedError: the time is used up.
        """
        self.budget.step()
        method = getattr(function, "__wrapped__", function)  # Jinja wraps str.format
        subject = getattr(method, "__self__", None)
        name = getattr(method, "__name__", "")
        if name == "join" and len(arguments) == 1 and isinstance(arguments[0], Iterator):
            arguments = (list(arguments[0]),)
        values = (*arguments, *named.values())
        for value in values:
            self.budget.require(value)
        require_result(name, subject, values)
        return self.budget.made(super().call(context, function, *arguments, **named))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Computes a sum, a product, a power, a remainder or a formatted text.

        Raises:
            SecurityError: it would be too large.
        """
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            if operator in ("*", "**"):
                _require_product(operator, _num_bits(operator, left, right))
        elif operator == "%" and isinstance(left, (str, bytes)):
            require_size(percent_size(left if isinstance(left, str) else left.decode("latin-1"), right))
        elif operator == "*":
            for items, count in ((left, right), (right, left)):
                if isinstance(items, (str, bytes, list, tuple)) and isinstance(count, int):
                    _require_product(operator, size_of(items) * count)
        elif (
            operator == "+" and isinstance(left, (str, bytes, list, tuple)) and isinstance(right, type(left))
        ):
            require_size(len(left) + len(right))
        return self.budget.made(super().call_binop(context, operator, left, right))

    @jinja2.pass_context  # with the context, Jinja writes no constant while it compiles
    def _written(self, context: jinja2.runtime.Context, value: Any) -> Any:
        """What a template writes for a value."""
        if not isinstance(value, str):
            self.budget.require(value)
            value = str(value)
        self.budget.write(value)
        return value

    def _concatenated(self, parts: list[Any]) -> str:
        """The text of the operator `~`."""
        require_size(sum(map(self.budget.require, parts)))
        text = "".join(map(str, parts))
        self.budget.made(text)
        return text

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose arguments and result are checked."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def guarded(*arguments: Any, **named: Any) -> Any:
            self.budget.step()
            subject, *others = arguments[first:]
            if name == "join" and isinstance(subject, Iterator):
                subject = list(subject)
            values = (*others, *named.values())
            for value in (subject, *values):
                self.budget.require(value)
            if name == "format":
                require_size(percent_size(str(subject), values))
            elif name == "join":
                require_result(name, str(values[0]) if values else "", (subject,))
            else:
                require_result(name, subject, values)
            return self.budget.made(function(*arguments[:first], subject, *others, **named))

        return guarded


class _Limits(NodeTransformer):
    """Adds the filters with limits to the tree of a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """Counts the passes of a loop."""
        node.iter = _filtered(node.iter, _COUNTED)
        return self.generic_visit(node)

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:  # noqa: N802
        """Limits what a variable or an attribute of a namespace gets."""
        node.node = _filtered(node.node, _LIMITED)
        return self.generic_visit(node)

    def visit_With(self, node: nodes.With) -> nodes.Node:  # noqa: N802
        """Limits what the variables of a block get."""
        node.values = [_filtered(value, _LIMITED) for value in node.values]
        return self.generic_visit(node)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        """Limits the text of a block that a variable gets."""
        node.filter = _filtered(node.filter, _LIMITED)
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """Limits what `~` joins."""
        return self.generic_visit(_filtered(nodes.List(node.nodes), _CONCATENATED))

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        """Counts the text between tags, which macros can also repeat."""
        return nodes.Const(node.data)


def _filtered(node: nodes.Node | None, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None)


class _Counted:
    """The items of a loop, each of which is a step."""

    def __init__(self, items: Iterable[Any], budget: Budget) -> None:
        self._items, self._budget = items, budget

    def __iter__(self) -> Iterator[Any]:
        return self._budget.counted(self._items)

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # a TypeError if they have no length, as without counting


def _num_bits(operator: str, left: float, right: float) -> int:
    """The size of a product or a power of numbers, in bits. Numbers with a fraction have a fixed size."""
    if not (isinstance(left, int) and isinstance(right, int)):
        return 0
    return left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()


def _require_product(operator: str, size: int) -> None:
    if size > _MAX_PRODUCT:
        raise SecurityError(f"a result of {operator} would have {size:,} items")


def _rounded(value: Any, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > _MAX_PRECISION:
        raise SecurityError(f"round has the precision {precision:,}")
    return jinja2.filters.do_round(value, precision, method)  # type: ignore[arg-type]


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, items: Any, attribute: Any = None, start: Any = 0) -> Any:
    """A sum of numbers. One of lists would copy each list again and again."""
    if not isinstance(start, (int, float)):
        raise SecurityError("sum begins with what is no number")
    return jinja2.filters.do_sum(environment, items, attribute, start)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON text. Jinja's own filter escapes the characters of HTML."""
    if size_of([indent, *(separators or ())]) > _LONG_SEPARATOR or (
        isinstance(indent, int) and indent > _MAX_INDENT
    ):
        raise SecurityError("tojson has an indentation or a separator that is too long")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    parts, size = list[str](), 0
    for part in encoder.iterencode(value):
        parts.append(part)
        size += len(part)
        require_size(size)
    return "".join(parts)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


class _Dictionary:
    """Makes dictionaries, as the type `dict`, whose attributes a template must not reach."""

    def __call__(self, *arguments: Any, **items: Any) -> dict[Any, Any]:
        return dict(*arguments, **items)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """A dictionary with the same value for several keys."""
        return dict.fromkeys(*arguments)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without underscored names, which would reach Python's internals."""

    def __init__(*arguments: Any, **items: Any) -> None:  # a template may name an item "self"
        self, *values = arguments
        names = dict(*values, **items)
        for name in names:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the underscored name {name!r}")
