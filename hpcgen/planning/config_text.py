"""The configuration of a stage's program as JSON that is readable in the batch script."""

from __future__ import annotations

import dataclasses
import json
from typing import Any


def config_text(config: Any) -> str:
    """JSON of a dataclass, with a line for its plain values, and a line for each section and each dataset.

    A null is omitted if the key's default is None, and so is a section whose keys all have their defaults, because the
    reader fills in the same values.
    """
    sections = _without_unset(config)
    plain = {name: value for name, value in sections.items() if not isinstance(value, dict | list)}
    lines = [", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in plain.items())]
    lines += [
        f"{json.dumps(name)}: {_section(value)}" for name, value in sections.items() if name not in plain
    ]
    return "{\n " + ",\n ".join(line for line in lines if line) + "\n}\n"


def _section(value: Any) -> str:
    if not isinstance(value, dict):
        return _value(value)
    return "{" + ", ".join(f"{json.dumps(name)}: {_value(each)}" for name, each in value.items()) + "}"


def _value(value: Any) -> str:
    """Compact JSON, except that a list of mappings, such as datasets, has a line for each."""
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n ]"
    return json.dumps(value)


def _is_filled_in(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(value):
        return bool(value == field.default_factory())
    return value is None and field.default is None


def _without_unset(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            field.name: _without_unset(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not _is_filled_in(field, getattr(value, field.name))
        }
    if isinstance(value, dict):
        return {name: _without_unset(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_unset(each) for each in value]
    return value
