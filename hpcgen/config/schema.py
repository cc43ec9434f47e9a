"""The JSON Schema of a run file, a cluster profile or a node type, with which editors check and complete YAML."""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from typing import Any

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.fields import text_of
from hpcgen.config.keys import field_docs, inner_class
from hpcgen.config.node_type import Health, NodeType, NvLink, PciLink, Processor, Variable
from hpcgen.config.run import RunConfig
from trainer.contract.config import ModelConfig, OptimizerConfig, Range, TrainingConfig, field_hints

EXTENDABLE = (ClusterConfig, NodeType)
"""Files that can extend another one."""
FILLED_IN = (
    *EXTENDABLE,
    *(Health, NvLink, PciLink, Processor, Variable),
    *(ModelConfig, TrainingConfig, OptimizerConfig),
)
"""Sections without required keys, because an extended file or a preset may provide them."""


@functools.cache
def schema_text(cls: type) -> str:
    """The schema of `cls` as JSON. Generating it takes 0.2 s."""
    return json.dumps(json_schema(cls), indent=1)


def json_schema(cls: type) -> dict[str, Any]:
    """pydantic's schema of `cls`, with hpcgen's descriptions, ranges and patterns."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(cls).json_schema()
    definitions = schema.get("$defs", {})
    for section in _classes(cls):
        target = schema if section is cls else definitions.get(section.__name__)
        if target is not None:
            _describe(section, target)
    return {**schema, "$schema": "http://json-schema.org/draft-07/schema#", "title": f"hpcgen {cls.__name__}"}


def _classes(cls: type) -> set[type]:
    found, pending = set(), [cls]
    while pending:
        section = pending.pop()
        if section not in found:
            found.add(section)
            hints = field_hints(section)
            inner = [inner_class(hints[field.name]) for field in dataclasses.fields(section)]
            pending += [each for each in inner if each is not None]
    return found


def _describe(section: type, schema: dict[str, Any]) -> None:
    docs, hints = field_docs(section), field_hints(section)
    if section in FILLED_IN:
        schema.pop("required", None)
    elif section is RunConfig:
        schema["required"] = ["name", "paths"]  # defaults.yaml may name the cluster
    if section.__doc__:
        schema["description"] = " ".join(section.__doc__.split())
    for name, field in schema["properties"].items():
        field["description"] = docs[name]
        if section is NodeType and name == "extends":  # one name needs no list
            field["type"] = ["array", "string"]
        # null removes an inherited entry
        if section in EXTENDABLE and typing.get_origin(hints[name]) is dict:
            entry = field["additionalProperties"]
            field["additionalProperties"] = {"anyOf": [entry, {"type": "null"}]}
        for place in (field, *field.get("anyOf", ())):
            for constraint in _constraints(hints[name]):
                place.update(_keywords(constraint, place.get("type")))


def _constraints(hint: Any) -> list[Any]:
    """The constraints on a value itself, but not on the items of a list or mapping."""
    if hasattr(hint, "__metadata__"):
        return list(hint.__metadata__)
    if typing.get_origin(hint) in (tuple, dict):
        return []
    return [constraint for arg in typing.get_args(hint) for constraint in _constraints(arg)]


def _keywords(constraint: Any, kind: str | None) -> dict[str, Any]:
    if kind == "string" and (text := text_of(constraint)):
        return {"pattern": f"^(?:{text.pattern})$"}
    if not isinstance(constraint, Range) or kind not in ("integer", "number"):
        return {}
    limits = {
        "minimum": constraint.at_least,
        "maximum": constraint.at_most,
        "exclusiveMinimum": constraint.above,
        "exclusiveMaximum": constraint.below,
    }
    return {keyword: limit for keyword, limit in limits.items() if limit is not None}
