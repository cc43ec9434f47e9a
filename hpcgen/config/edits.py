"""Edits of YAML text that keep the rest of it: comments, order, quotes and indentation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hpcgen.config import document as documents
from hpcgen.errors import HpcgenError

Keys = Sequence[str | int]
"""The keys of mappings and the indices of lists on the way to a value."""

_PLAIN = re.compile(r"(?!(?:null|true|false|yes|no|on|off)$)[A-Za-z/][\w./-]*", re.IGNORECASE)
"""A text that needs no quotes in any version of YAML."""
_REASON = re.compile(r"^[ \t]*# hpcgen (?:init|layouts|tune): [^\n]*\n", re.MULTILINE)
"""A line with the reason of a choice."""
_TO_END_OF_LINE = re.compile(r"[ \t]*(#[^\n]*)?(?=\n|$)")


def with_value(text: str, name: str, keys: Keys, value: Any, note: str = "") -> str:
    """The text of the file `name` with `value` at `keys`. A new line of a section gets the comment `note`.

    Raises:
        HpcgenError: the text cannot be edited, for example because the value is an alias.
    """

    edited = _with_value(text, _root(text), keys, _yaml(value), note)
    return _checked(text, edited, name, keys, lambda values: _set(values, keys, value))


def with_values(text: str, name: str, values: Mapping[str, Any], reason: str) -> str:
    """The text of the file `name` with values at dotted paths. A line with the comment `reason` precedes the first one.

    `reason` begins with the command that chose the values, as in "hpcgen layouts: 12% faster". It replaces the reasons
    of earlier choices. A key or section that is commented out is uncommented at its place.

    Raises:
        HpcgenError: see `with_value`.
    """
    before = documents.parse(text, name).values
    without_reasons = _REASON.sub("", text)
    text = without_reasons if _has_values(without_reasons, name, before) else text
    for path, value in values.items():
        text = _with_value_at_its_place(text, name, path.split("."), value)
    first = next(iter(values)).split(".")
    commented = _with_comment(text, first, reason)
    return commented if _has_values(commented, name, documents.parse(text, name).values) else text


def with_first(text: str, name: str, key: str, value: Any) -> str:
    """The text of the file `name` with a new key before the others.

    Raises:
        HpcgenError: see `with_value`.
    """
    root = _root(text)
    start = root.start_mark.index + 1 if root.flow_style else _entries(text, root)[0].start
    end = ", " if root.flow_style else "\n"
    edited = f"{text[:start]}{key}: {_yaml(value)}{end}{text[start:]}"
    return _checked(text, edited, name, [key], lambda values: values.update({key: value}))


def without(text: str, name: str, keys: Keys) -> str:
    """The text of the file `name` without the value at `keys`, and without the sections that would be empty.

    Raises:
        HpcgenError: the text cannot be edited, for example because other values are aliases of this one.
    """

    def change(values: Any) -> Any:
        *sections, last = keys
        parents = [values]
        for key in sections:
            parents.append(parents[-1][key])
        del parents[-1][last]
        for parent, key in zip(reversed(parents[:-1]), reversed(sections), strict=True):
            if not parent[key]:
                del parent[key]

    return _checked(text, _without(text, _root(text), keys), name, keys, change)


def comment_of(text: str, keys: Keys) -> str:
    """The comment behind the value at `keys`, on its last line; empty for none."""
    node = _root(text)
    for key in keys:
        [entry] = (entry for entry in _entries(text, node) if entry.key == key)
        node = entry.node
    return text[entry.end : _end_of_line(text, entry.end)].strip().removeprefix("#").strip()


def _set(values: Any, keys: Keys, value: Any) -> None:
    *sections, last = keys
    for key in sections:
        if isinstance(values, dict) and not isinstance(values.get(key), dict | list):
            values[key] = {}
        values = values[key]
    values[last] = list(value) if isinstance(value, tuple) else value


def _checked(text: str, edited: str, name: str, keys: Keys, change: Callable[[Any], Any]) -> str:
    """The edited text, if its values are those of the text after `change`."""
    expected = documents.parse(text, name).values
    change(expected)
    if _has_values(edited, name, expected):
        return edited
    path = ".".join(map(str, keys))
    raise HpcgenError(
        f"{path} cannot be changed automatically", "write it without aliases and tags", where=name
    )


def _has_values(text: str, name: str, expected: Any) -> bool:
    """True if the text is valid and has these values."""
    try:
        return bool(documents.parse(text, name).values == expected)
    except HpcgenError:
        return False


class _Entry(NamedTuple):
    """An entry of a mapping or a list, as positions in the text."""

    key: str | int
    start: int
    """Where its key or its dash begins."""
    after_key: int
    """Where its key ends, or its item begins."""
    end: int
    """Where its value ends, without what follows on the line."""
    node: Any


def _root(text: str) -> Any:
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True).compose(text)


def _entries(text: str, node: Any) -> list[_Entry]:
    """The entries of a mapping or a list; empty for a scalar."""
    if node is None or node.id == "scalar":
        return []
    if node.id == "mapping":
        return [
            _Entry(key.value, key.start_mark.index, key.end_mark.index, _end(text, item), item)
            for key, item in node.value
        ]
    found = []
    for index, item in enumerate(node.value):
        start = item.start_mark.index
        dash = start if node.flow_style else text.rfind("-", 0, start)
        found.append(_Entry(index, dash, start, _end(text, item), item))
    return found


def _end(text: str, node: Any) -> int:
    """Where a value ends. The marks of collections in block style are behind the comments that follow them."""
    entries = [] if getattr(node, "flow_style", True) else _entries(text, node)
    end: int = entries[-1].end if entries else node.end_mark.index
    return len(text[:end].rstrip())


def _with_value(text: str, node: Any, keys: Keys, value: str, note: str) -> str:
    key, *rest = keys
    entries = _entries(text, node)
    found = next((entry for entry in entries if entry.key == key), None)
    if found is not None and rest and _entries(text, found.node):
        return _with_value(text, found.node, rest, value, note)
    if found is not None:
        return f"{text[: found.after_key]}: {_nested(rest, value)}{text[found.end :]}"
    line = f"{key}: {_nested(rest, value)}"
    if node is not None and node.flow_style:
        end = entries[-1].end if entries else node.end_mark.index - 1
        return f"{text[:end]}{', ' if entries else ''}{line}{text[end:]}"
    if not entries:
        return f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{_noted(line, note)}\n"
    end = _end_of_line(text, entries[-1].end)
    return f"{text[:end]}\n{' ' * _column(text, entries[0].start)}{_noted(line, note)}{text[end:] or chr(10)}"


def _with_value_at_its_place(text: str, name: str, keys: Sequence[str], value: Any) -> str:
    """The text with `value` in the line where the key is commented out, in a new section, or else as `with_value`."""
    expected = documents.parse(text, name).values
    _set(expected, keys, value)
    for edited in (_uncommented(text, keys, value), _with_new_section(text, keys, value)):
        if edited is not None and _has_values(edited, name, expected):
            return edited
    return with_value(text, name, keys, value)


def _uncommented(text: str, keys: Sequence[str], value: Any) -> str | None:
    """The text with `value` where the last key is commented out, and with its sections uncommented. None if it is not
    commented out."""
    lines = text.splitlines(keepends=True)
    start, end, found = 0, len(lines), None
    for key in keys:
        ending = "" if key == keys[-1] else r"\s*(#.*)?$"
        pattern = re.compile(rf"(?P<indent> *)(?P<mark># )?(?P<key>{re.escape(key)}:){ending}")
        matches = {number: pattern.match(lines[number]) for number in range(start, end)}
        candidates = {number: match for number, match in matches.items() if match is not None}
        if not candidates:
            return None
        number = min(candidates, key=lambda number: (candidates[number]["mark"] is not None, number))
        found, start = candidates[number], number + 1
        end = next((line for line in range(start, end) if _ends_section(lines[line], found)), end)
        if found["mark"]:
            lines[number] = lines[number].replace("# ", "", 1)
    if found is None or not found["mark"]:
        return None
    lines[start - 1] = f"{found['indent']}{found['key']} {_yaml(value)}\n"
    return "".join(lines)


def _ends_section(line: str, heading: re.Match[str]) -> bool:
    """True if a line is not indented further than the heading of its section."""
    return bool(line.strip()) and len(line) - len(line.lstrip()) <= len(heading["indent"])


def _with_new_section(text: str, keys: Sequence[str], value: Any) -> str | None:
    """The text with a new section in block style at its end. None if it has the section, or is in flow style."""
    root = _root(text)
    if len(keys) == 1 or root is None or root.flow_style:
        return None
    if any(entry.key == keys[0] for entry in _entries(text, root)):
        return None
    headings = [f"{'  ' * depth}{key}:" for depth, key in enumerate(keys)]
    return "\n".join([text.rstrip("\n"), *headings]) + f" {_yaml(value)}\n"


def _with_comment(text: str, keys: Keys, comment: str) -> str:
    """The text with a line for a comment before the line of a key."""
    node = _root(text)
    for key in keys:
        [entry] = (entry for entry in _entries(text, node) if entry.key == key)
        node = entry.node
    start = text.rfind("\n", 0, entry.start) + 1
    line = text[start : entry.start]
    return f"{text[:start]}{line[: len(line) - len(line.lstrip())]}# {comment}\n{text[start:]}"


def _yaml(value: Any) -> str:
    """The value on one line. JSON is YAML."""
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else json.dumps(value)


def _nested(keys: Keys, value: str) -> str:
    """The value as the value of these keys, in flow style."""
    for key in reversed(keys):
        value = f"{{{key}: {value}}}"
    return value


def _noted(line: str, note: str) -> str:
    return f"{line}  # {note}" if note else line


def _without(text: str, node: Any, keys: Keys) -> str:
    entries = _entries(text, node)
    index = next(index for index, entry in enumerate(entries) if entry.key == keys[0])
    entry = entries[index]
    if len(keys) > 1 and not _has_one(text, entry.node, keys[1:]):
        return _without(text, entry.node, keys[1:])
    if node.flow_style:
        if index + 1 < len(entries):
            return text[: entry.start] + text[entries[index + 1].start :]
        start = entries[index - 1].end if index else entry.start
        return text[:start] + text[entry.end :]
    column = _column(text, entry.start)
    end = _end_of_line(text, entry.end)
    while (comment := re.match(r"\n( *)#[^\n]*", text[end:])) and len(comment[1]) > column:
        end += comment.end()  # a comment inside the section
    return text[: entry.start - column] + text[end + 1 :]


def _has_one(text: str, node: Any, keys: Keys) -> bool:
    """True if removing the value at `keys` leaves an empty section."""
    entries = _entries(text, node)
    if len(entries) != 1:
        return False
    return len(keys) == 1 or _has_one(text, entries[0].node, keys[1:])


def _column(text: str, position: int) -> int:
    return position - (text.rfind("\n", 0, position) + 1)


def _end_of_line(text: str, position: int) -> int:
    found = _TO_END_OF_LINE.match(text, position)
    return found.end() if found else position
