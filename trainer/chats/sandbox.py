"""The sandbox of chat templates: Jinja's own, with a limit for time and the functions of transformers.

A template may loop over loops, or call its macros from themselves. So the CPU time of the thread is checked in loops
and calls. This needs no timer and works in all threads. A busy machine changes nothing. The system limits the memory:
see `limited_memory`. In a job, Slurm does.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CPU_S = 5.0
"""Maximum CPU time of a rendering, in seconds."""
_CHECKED_STEPS = 16
"""Number of steps between two looks at the clock. One step may sort 100,000 items, Jinja's limit of `range`."""
_MAX_PRODUCT = 1_000_000
_COUNTED = "<counted>"
"""Filter that `Sandbox.compiled` adds. No template can name it."""


class ExhaustedError(Exception):
    """A template has used up its time."""


class Budget(threading.local):
    """CPU time that a rendering has left, in each thread that renders."""

    def __init__(self) -> None:
        self._steps = 0
        self._deadline_s = 0.0

    def start(self) -> None:
        """Begin a rendering."""
        self._deadline_s = time.thread_time() + MAX_CPU_S

    def step(self) -> None:
        """Count a pass of a loop, or a call.

        Raises:
            ExhaustedError: the rendering has taken MAX_CPU_S.
        """
        self._steps += 1
        if self._steps % _CHECKED_STEPS == 0 and time.thread_time() > self._deadline_s:
            raise ExhaustedError(f"is not done after {MAX_CPU_S:g} s of CPU time")


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment with the settings of transformers' apply_chat_template. Jinja itself limits `range`."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, extension: type[Extension], strftime_now: Callable[[str], str]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[extension, loopcontrols],
            optimized=False,  # else constants are computed while a template is compiled
        )
        self.budget = Budget()
        self.filters["tojson"] = _tojson
        self.filters[_COUNTED] = lambda items: _Counted(items, self.budget.step)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = strftime_now
        self.globals["dict"] = _Dictionary()
        self.globals["namespace"] = _Namespace

    def compiled(self, source: str) -> jinja2.Template:
        """Compile a template whose loops count their passes.

        Raises:
            TemplateSyntaxError: it is not valid Jinja.
        """
        return self.from_string(_CountedLoops().visit(self.parse(source)))

    def rendered(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """The text that a compiled template writes.

        Raises:
            SecurityError: the template does what is forbidden.
            ExhaustedError: it takes more than MAX_CPU_S.
        """
        self.budget.start()
        return template.render(variables)

    def call(self, context: jinja2.runtime.Context, function: Any, /, *arguments: Any, **named: Any) -> Any:
        """Call a function or a macro.

        Raises:
            SecurityError: it is not safe.
            ExhaustedError: the time is used up.
        """
        self.budget.step()
        return super().call(context, function, *arguments, **named)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Computes a product or a power.

        Raises:
            SecurityError: it would be longer than _MAX_PRODUCT items, or have more bits.
        """
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        else:
            bits = max(
                (
                    len(items) * count
                    for items, count in ((left, right), (right, left))
                    if _can_repeat(items, count)
                ),
                default=0,
            )
        if bits > _MAX_PRODUCT:
            raise SecurityError(f"a result of {operator} would have {bits:,} items")
        return super().call_binop(context, operator, left, right)


class _CountedLoops(NodeTransformer):
    """Adds the filter that counts to the loops of a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """Counts the passes of a loop."""
        node.iter = nodes.Filter(node.iter, _COUNTED, [], [], None, None)
        return self.generic_visit(node)


class _Counted:
    """The items of a loop, each of which is a step."""

    def __init__(self, items: Iterable[Any], step: Callable[[], None]) -> None:
        self._items, self._step = items, step

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._step()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # a TypeError if they have no length, as without counting


def _can_repeat(items: Any, count: Any) -> bool:
    return isinstance(items, (str, list, tuple)) and isinstance(count, int)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON text. Jinja's own filter escapes the characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


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
