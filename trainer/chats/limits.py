"""Limits on the memory and the time of a chat template, which is a program of strangers.

A template may loop over loops, call its macros from themselves, double a text again and again, or ask for a text of a
billion characters in a single operation. So the CPU time of the thread is checked in loops and calls, the size of each
value is limited, and the size of what an operation would make is computed before. This needs no timer and works in all
threads. A busy machine changes nothing.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_CPU_S = 5.0
"""Maximum CPU time of a rendering, in seconds."""
MAX_SIZE = 2**25
"""Maximum size of a value, as `size_of` counts. All of a chat has less."""
_MAX_WRITTEN = 4 * MAX_SIZE
"""Maximum number of characters that a rendering writes, also into variables and macros."""
_MAX_MADE = 16 * MAX_SIZE
"""Maximum size of all values that a rendering makes, most of which it no longer has."""
_ITEM = 32
"""Size of an item of a list, in characters."""
_MAX_WIDTH = 9999
_CHECKED_STEPS = 16
"""Number of steps between two looks at the clock. One step may sort 100,000 items, Jinja's limit of `range`."""
_SIZE_PER_STEP = 2**16
_WIDE_PERCENT_FIELD = re.compile(r"%[^%]*\*|\d{5,}(?=[.hlLdiouxXeEfFgGcrsa])")
_WIDE_BRACE_FIELD = re.compile(r"\{[^{}]+\{|\d{5,}(?=[.,_}bcdeEfFgGnosxX%])")


class ExhaustedError(Exception):
    """A template has used up its time."""


class Budget(threading.local):
    """Time and memory that a rendering has left, in each thread that renders."""

    def __init__(self) -> None:
        self._steps = self._size = 0
        self._deadline_s = 0.0
        self._written = self._made = 0

    def start(self) -> None:
        """Begin a rendering."""
        self._deadline_s = time.thread_time() + MAX_CPU_S
        self._written = self._made = 0

    def step(self) -> None:
        """Count a pass of a loop, or a call.

        Raises:
            ExhaustedError: the rendering has taken MAX_CPU_S.
        """
        self._steps += 1
        if self._steps % _CHECKED_STEPS == 0 and time.thread_time() > self._deadline_s:
            raise ExhaustedError(f"is not done after {MAX_CPU_S:g} s of CPU time")

    def write(self, text: str) -> None:
        """Count characters that are written.

        Raises:
            SecurityError: they are more than _MAX_WRITTEN.
        """
        self._written += len(text)
        if self._written > _MAX_WRITTEN:
            raise SecurityError(f"it writes more than {_MAX_WRITTEN:,} characters")

    def made(self, value: Any) -> Any:
        """A value that the template has made. The items of an iterator are checked when they are read.

        Raises:
            SecurityError: the value has more than MAX_SIZE, or all have more than _MAX_MADE.
            ExhaustedError: the time is used up.
        """
        if isinstance(value, Iterator):
            return self._checked_items(value)
        size = self.require(value)
        self._made += size
        if self._made > _MAX_MADE:
            raise SecurityError(f"it makes values of more than {_MAX_MADE:,} characters and items")
        return value

    def require(self, value: Any) -> int:
        """The size of a value that is used.

        Raises:
            SecurityError: it is more than MAX_SIZE.
            ExhaustedError: the time is used up.
        """
        size = size_of(value)
        self._size += size
        if self._size > _SIZE_PER_STEP:
            self._size = 0
            self.step()
        return size

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop, each of which is a step."""
        for item in items:
            self.step()
            yield item

    def _checked_items(self, items: Iterator[Any]) -> Iterator[Any]:
        total = 0
        for item in self.counted(items):
            total += _ITEM + self.require(item)
            require_size(total)
            yield item


def require_size(size: int) -> None:
    """Refuse a value of this size.

    Raises:
        SecurityError: it is more than MAX_SIZE.
    """
    if size > MAX_SIZE:
        raise SecurityError(f"a value has {size:,} characters or items, or more")


def size_of(value: Any) -> int:
    """The number of characters in a value, with those of its items, as often as they occur, and _ITEM for each item.

    A list that has another list twice, which has another list twice, and so on, is small in memory and large as text.

    Raises:
        SecurityError: it is more than MAX_SIZE.
    """
    size, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, (str, bytes)):
            size += len(item)
        elif isinstance(item, (list, tuple, set, frozenset)):
            size += _ITEM * len(item)
            require_size(size)
            left.extend(item)
        elif isinstance(item, (dict, Namespace)):
            pairs = item if isinstance(item, dict) else item._Namespace__attrs
            size += _ITEM * len(pairs)
            require_size(size)
            left.extend(pairs)
            left.extend(pairs.values())
        elif isinstance(item, int):
            size += item.bit_length() // 8
        require_size(size)
    return size


def require_result(operation: str, subject: Any, values: tuple[Any, ...]) -> None:
    """Refuse an operation whose result would be too large.

    `operation` is a filter, or a method of text and numbers, of the value `subject` with the arguments `values`.

    Raises:
        SecurityError: the result would have more than MAX_SIZE.
    """
    if operation in _RESULT_SIZES and isinstance(subject, (str, bytes, int, list, tuple)):
        require_size(_RESULT_SIZES[operation](subject, values))


def percent_size(text: str, values: Any) -> int:
    """The size of `text % values` at most.

    Raises:
        SecurityError: a width is in the values, or has five digits.
    """
    return _formatted_size(text, text.count("%"), _WIDE_PERCENT_FIELD.search(text), values)


def _brace_size(text: str, values: Any) -> int:
    """The size of `text.format(values)` at most."""
    return _formatted_size(text, text.count("{"), _WIDE_BRACE_FIELD.search(text.replace("{{", "")), values)


def _formatted_size(text: str, num_fields: int, wide: re.Match[str] | None, values: Any) -> int:
    if num_fields and wide:
        raise SecurityError(f"a format has the width {wide[0][-20:]!r}")
    return len(text) + num_fields * max(_MAX_WIDTH, size_of(values))


def _replaced_size(text: Any, values: tuple[Any, ...]) -> int:
    size: int = len(text)
    if len(values) >= 2 and all(isinstance(value, (str, bytes)) for value in values[:2]):
        size += text.count(values[0]) * len(values[1])
    return size


def _joined_size(separator: Any, items: Any) -> int:
    if not isinstance(separator, (str, bytes)) or not isinstance(items, (str, list, tuple, dict)):
        return 0
    return len(separator) * len(items) + size_of(items)


def _longest(values: tuple[Any, ...]) -> int:
    """The largest number or text among arguments."""
    return max((value if isinstance(value, int) else size_of(value) for value in values), default=0)


_RESULT_SIZES: dict[str, Callable[[Any, tuple[Any, ...]], int]] = {
    "ljust": lambda text, values: _longest(values[:1]),
    "rjust": lambda text, values: _longest(values[:1]),
    "center": lambda text, values: _longest(values[:1]),
    "zfill": lambda text, values: _longest(values),
    "to_bytes": lambda number, values: _longest(values),
    "expandtabs": lambda text, values: len(text) + text.count("\t") * _longest(values),
    "translate": lambda text, values: len(text) * max(map(_translated_size, values), default=1),
    "replace": _replaced_size,
    "join": lambda separator, values: _joined_size(separator, values[0] if values else ()),
    "format": _brace_size,
    "format_map": _brace_size,
    "indent": lambda text, values: len(text) + (text.count("\n") + 1) * _longest(values),
}
"""The size that the result of an operation has at most, from its subject and its arguments."""


def _translated_size(table: Any) -> int:
    values = table.values() if isinstance(table, dict) else ()
    return max((len(value) for value in values if isinstance(value, str)), default=1)
