"""Corrections of values of the wrong type."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from hpcgen.config.keys import hint_of, key_paths, section_of
from hpcgen.config.layer_pattern import layer_pattern
from hpcgen.config.shown import NUMBER, is_private, show
from trainer.contract.model.adapters import advice_for_peft

GROUPED = re.compile(r"[-+]?\d{1,3}(,\d{3})+")
"""A number with separators of thousands."""
ABBREVIATED = re.compile(r"(\d{1,6})\s*([kmgt])i?b?", re.IGNORECASE)
"""A number with a unit prefix, which is decimal or binary."""
WEIGHTED = re.compile(r"(\d*\.?\d+)\s+(\S+)")
"""A weight and the prefix of a dataset, as in Megatron-LM's --data-path."""
_INDEX = re.compile(r"-?\d+|append|first|last")
"""A name that other programs accept in place of an item of a list."""
BOOLEANS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
"""Booleans of YAML 1.1, which are texts in YAML 1.2."""
NULLS = ("none", "null", "nil")
MOST_EXACT = 2**53
"""Larger floating-point numbers have no exact value."""
MOST_LISTED = 256
"""Longest list in a hint."""


def correction(
    cls: type, path: str, names: Sequence[str], kind: str, value: Any, document: Mapping[str, Any]
) -> str:
    """The correction of `value`, at a path of keys below `cls`; empty if unknown.

    `kind` is pydantic's type of the error. `document` is the complete document.
    """
    if path == "model.moe_layer_freq":
        return _layers_with_experts(document["model"])
    if path == "model.window_size" and (window := _window(value)):
        return f"write {window}, which includes the token itself"
    if path == "lora.target_modules" and isinstance(value, str) and (advice := advice_for_peft([value])):
        return advice
    # --set 'path[0]=...' makes a mapping of indices
    if kind == "tuple_type" and isinstance(value, dict) and any(map(_INDEX.fullmatch, value)):
        return f"write the complete list, as in --set '{path}=[...]'"
    if kind == "tuple_type":
        yaml = _as_list(cls, path, names, value)
    elif kind in ("dataclass_type", "dataclass_exact_type", "dict_type"):
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            return 'remove the "-" before its keys'
        yaml = _as_mapping(cls, path, names, value)
        if not yaml and isinstance(value, str):
            return _as_key(cls, names[-1])
    elif isinstance(value, str):
        yaml = _as_scalar(hint_of(cls, names), kind, value.strip())
    else:
        is_whole = isinstance(value, float) and value.is_integer() and abs(value) < MOST_EXACT
        yaml = str(int(value)) if kind == "int_type" and is_whole else ""
    return f"write {yaml}" if yaml else ""


def _layers_with_experts(model: Mapping[str, Any]) -> str:
    """The correction of a number or an expression in place of the list of layers with experts.

    Megatron-Core accepts a number, and Megatron-LM also a Python expression.
    """
    layers = model.get("num_layers")
    pattern = layer_pattern(str(model["moe_layer_freq"]), layers if isinstance(layers, int) else None)
    if not pattern or len(pattern) > MOST_LISTED:
        return "write 1 for each layer with experts and 0 for each other layer"
    return "remove it, because all layers have experts by default" if all(pattern) else f"write {pattern}"


def _window(value: Any) -> int | None:
    """The size of a window that is given as Megatron-LM's pair of numbers of tokens before and after a token.

    None if `value` is no such pair, or if the window includes tokens after the token.
    """
    pair = re.findall(r"-?\d+", str(value))
    return int(pair[0]) + 1 if len(pair) == 2 and pair[1] == "0" else None


def _as_scalar(hint: Any, kind: str, text: str) -> str:
    if text.lower() in NULLS and type(None) in typing.get_args(hint):
        return "null"
    if kind == "bool_type":
        text = text.lower()
        return BOOLEANS.get(text, text if text in BOOLEANS.values() else "")
    if kind not in ("int_type", "float_type"):
        return ""
    if NUMBER.fullmatch(text):
        return f"{text} without quotes"
    if GROUPED.fullmatch(text):
        return text.replace(",", "")
    if found := ABBREVIATED.fullmatch(text):
        power = "kmgt".index(found[2].lower()) + 1
        return f"{int(found[1]) * 1000**power} or {int(found[1]) * 1024**power}"
    decimal = text.replace(",", ".")
    return decimal if kind == "float_type" and NUMBER.fullmatch(decimal) else ""


def _as_mapping(cls: type, path: str, names: Sequence[str], value: Any) -> str:
    """The mapping for a value in place of a section: its required keys, with the value if there is only one.

    A weight in front of a path, as in Megatron-LM's --data-path, becomes a key.
    """
    section = section_of(cls, names)
    fields = dataclasses.fields(section) if section else ()
    is_weighted = "weight" in {field.name for field in fields}
    if is_weighted and isinstance(value, int | float):
        return f"{{weight: {value}, prefix: ...}} for each pair"
    needed = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]
    if len(needed) > 1:
        return f"{{{', '.join(f'{name}: ...' for name in needed)}}}"
    if not isinstance(value, str):
        return ""
    if is_weighted and (found := WEIGHTED.fullmatch(value)):
        return f"{{weight: {found[1]}, prefix: {show(found[2])}}}"
    if not needed or is_private(path):
        return ""
    [name] = needed
    is_list = typing.get_origin(hint_of(cls, [*names, name])) is tuple
    inner = _as_list(cls, f"{path}.{name}", [*names, name], value) if is_list else show(value)
    return f"{{{name}: {inner}}}"


def _as_key(cls: type, name: str) -> str:
    """The key that has the name of a section, for a value in place of the section; empty if there are several."""
    found = [
        key for key in key_paths(cls) if key.endswith(f".{name}") and not section_of(cls, key.split("."))
    ]
    return f"use {found[0]}" if len(found) == 1 else ""


def _as_list(cls: type, path: str, names: Sequence[str], value: Any) -> str:
    """The list for a value in place of a list: a command's words, as a shell would split them, or one item."""
    has_sections = section_of(cls, names) is not None
    if isinstance(value, dict):
        return 'a "-" before the first of its keys' if has_sections else ""
    if not isinstance(value, str):
        return json.dumps([value]) if _has_numbers(hint_of(cls, names)) and value is not None else ""
    if path.endswith("command"):
        try:
            return json.dumps(shlex.split(value))
        except ValueError:  # a quote without its partner
            return "its words as a list, such as [python, train.py]"
    if has_sections:
        item = _as_mapping(cls, path, names, value)
        return f"[{item}]" if item else ""
    if _has_numbers(hint_of(cls, names)):
        return ""
    return json.dumps([value] if re.search("[=/]", value) else re.split(r"[,\s]+", value))


def _has_numbers(hint: Any) -> bool:
    return hint in (int, float) or any(map(_has_numbers, typing.get_args(hint)))
